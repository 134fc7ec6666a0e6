// Reductions of gradients that send two thin factors of each matrix: PowerSGD, Vogels et al., arXiv:1905.13727
// (algorithms 1 and 2; torch's powerSGD_hook).
//
//   M = gradient + error, one matrix [m, k] for each parameter of the bucket
//   P = M Q         [m, r], added over the ranks; then its columns made orthonormal
//   Q = M^T P       [k, r], added over the ranks
//   result P Q^T;   error = M - P (own Q)^T
//
// Q of a step begins the next one (warm start), so that a step costs one power iteration. The P of all matrices of a
// bucket are one all-reduce, with the parameters that are no matrix, or too small for factors to save anything, as they
// are; the Q are another one. Factors are float32. An element sends 4 r (m + k) / (m k) bytes where an all-reduce in
// float32 sends 4.
//
// Every rank has the same factors bit by bit, and multiplies them itself: results have the same bits where ranks run
// the same number of threads on processors of one kind, as operators of LibTorch in general.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/error_memory.h"
#include "compression/exchange_groups.h"
#include "compression/matrix_bucket.h"

namespace ds::compression {

// Alone, a rank keeps its gradient. A reduce-scatter sends as much as an all-reduce. Where a rank has Inf or NaN, all
// of the bucket arrives as NaN, and no rank's errors change.
class PowerSgdReduction final : public comm::BucketReduction {
 public:
  PowerSgdReduction(ExchangeGroups groups, ErrorMemory errors, std::vector<MatrixBucket> buckets, at::Device device);

  void begin_pass(int64_t step, double scale) override;
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;
  // The errors, and "factors.BUCKET": Q of the last step, the same on all ranks.
  std::vector<std::pair<std::string, at::Tensor>> memory() const override;
  void forget() override;

 private:
  struct Exchange;

  at::Tensor factor(const at::Tensor& flat, int64_t offset, int64_t rows, int64_t rank) const;
  comm::Work exchange_right(Exchange& exchange, const std::string& label) const;
  void finish(Exchange& exchange) const;

  ExchangeGroups groups_;
  ErrorMemory errors_;
  std::vector<MatrixBucket> buckets_;
  std::vector<at::Tensor> right_;  // per bucket: float32 [right_numel]; undefined without matrices
};

}  // namespace ds::compression
