// Which whole parameters a bucket holds, for optimizers that need more of a parameter than the slice has.
#pragma once

#include <cstdint>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::optimizers {

// Runs of one parameter inside the bucket (as a rule one), in order of parameter_offset.
struct BucketParameter {
  int64_t parameter = 0;
  std::vector<Segment> runs;
};

// The parameters of the slice's bucket, equal in content and order on every rank. Throws UsageError naming
// `optimizer` when the bucket does not hold the whole of a parameter.
std::vector<BucketParameter> bucket_parameters(const Slice& slice, const char* optimizer);

}  // namespace ds::optimizers
