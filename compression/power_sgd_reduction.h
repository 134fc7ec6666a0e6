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
#include "core/slices/segment.h"

namespace ds::compression {

struct BucketMatrix {
  int64_t offset = 0;  // the first element's place in the bucket; elements are row-major
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t rank = 0;  // columns of its factors

  int64_t numel() const { return rows * columns; }
  int64_t left_numel() const { return rows * rank; }
  int64_t right_numel() const { return columns * rank; }
};

struct DenseRange {
  int64_t offset = 0;
  int64_t length = 0;
};

struct MatrixBucket {
  int64_t numel = 0;  // padding included; 0 for a bucket that never comes
  std::vector<BucketMatrix> matrices;
  std::vector<DenseRange> dense;  // the other parameters; adjacent ones are one range

  // Elements of the left, and of the right, factors of all matrices.
  int64_t left_numel() const;
  int64_t right_numel() const;
  int64_t dense_numel() const;
};

// `segments`: whole parameters of a bucket of `numel` elements. A parameter of two or more dimensions is a matrix with
// its first dimension as rows. Where two factors of `rank` columns are no smaller than the parameter, it stays dense.
// Throws UsageError for a segment that cuts a parameter.
MatrixBucket matrices_of(const std::vector<Segment>& segments, const std::vector<ParameterInfo>& parameters,
                         int64_t numel, int64_t rank);

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
