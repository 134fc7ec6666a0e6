// The parameters of a bucket as matrices, for low-rank compression. Torch-free.
#pragma once

#include <cstdint>
#include <vector>

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

}  // namespace ds::compression
