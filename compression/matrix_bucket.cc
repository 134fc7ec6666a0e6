#include "compression/matrix_bucket.h"

#include <algorithm>

#include "core/check.h"

namespace ds::compression {

int64_t MatrixBucket::left_numel() const {
  int64_t total = 0;
  for (const BucketMatrix& matrix : matrices) total += matrix.left_numel();
  return total;
}

int64_t MatrixBucket::right_numel() const {
  int64_t total = 0;
  for (const BucketMatrix& matrix : matrices) total += matrix.right_numel();
  return total;
}

int64_t MatrixBucket::dense_numel() const {
  int64_t total = 0;
  for (const DenseRange& range : dense) total += range.length;
  return total;
}

MatrixBucket matrices_of(const std::vector<Segment>& segments, const std::vector<ParameterInfo>& parameters,
                         int64_t numel, int64_t rank) {
  require(rank > 0, "matrices_of: expected a rank above 0, found ", rank);
  MatrixBucket bucket{.numel = numel, .matrices = {}, .dense = {}};
  for (const Segment& segment : segments) {
    const ParameterInfo& parameter = parameters.at(static_cast<size_t>(segment.parameter));
    require(segment.length == parameter.numel, "matrices_of: parameter ", parameter.name, ": expected all of its ",
            parameter.numel, " elements in one segment, found ", segment.length);
    BucketMatrix matrix{.offset = segment.slice_offset};
    if (parameter.sizes.size() >= 2 && parameter.numel > 0) {
      matrix.rows = parameter.sizes.front();
      matrix.columns = parameter.numel / matrix.rows;
      matrix.rank = std::min({rank, matrix.rows, matrix.columns});
    }
    if (matrix.left_numel() + matrix.right_numel() < matrix.numel()) {
      bucket.matrices.push_back(matrix);
    } else if (!bucket.dense.empty() &&
               bucket.dense.back().offset + bucket.dense.back().length == segment.slice_offset) {
      bucket.dense.back().length += segment.length;
    } else {
      bucket.dense.push_back({segment.slice_offset, segment.length});
    }
  }
  return bucket;
}

}  // namespace ds::compression
