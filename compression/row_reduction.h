// Gradients of tables of which a step looks up few rows: those rows travel, with their numbers, and not the zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/bucket_reduction.h"
#include "compression/exchange_groups.h"

namespace ds::compression {

// Matrices of one width, whole, one behind another in a bucket. Their rows are numbered through.
struct RowBucket {
  struct Matrix {
    int64_t offset = 0;  // of its first element in the bucket
    int64_t rows = 0;
  };
  std::vector<Matrix> matrices;
  int64_t width = 0;

  int64_t rows() const;
};

// Exact: rows are added in float32, by the number of the rank, and rounded once. Ranks tell each other first how many
// rows they have; where all of them would be more to send than the bucket as it is, the bucket is sent as it is, which
// all ranks decide alike from these numbers. A row counts where an element is not 0, so that NaN and Inf travel.
class RowReduction final : public comm::BucketReduction {
 public:
  // One for each bucket; those without matrices are not taken. Throws UsageError for 2^31 rows or more.
  RowReduction(ExchangeGroups groups, std::vector<RowBucket> buckets);

  bool takes(size_t bucket) const override { return !buckets_.at(bucket).matrices.empty(); }
  comm::Work start(size_t bucket, const at::Tensor& output, const at::Tensor& gradient, comm::ReduceOp op,
                   std::string label) override;

 private:
  ExchangeGroups groups_;
  std::vector<RowBucket> buckets_;
};

}  // namespace ds::compression
