// Runs of elements that this rank has of tensors of the whole model, and parts that other ranks have written of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "dsengine/fully_shard.h"

namespace ds::loops {

struct OwnPart {
  std::string name;
  std::vector<int64_t> sizes;  // of the whole
  int64_t offset = 0;          // in the flattened whole
  at::Tensor values;           // flat, shares memory with what it is a part of
};

using GivenParts = std::unordered_map<std::string, std::vector<const ShardedTensor*>>;

// By name; they point into `parts`.
GivenParts given_parts(const std::vector<ShardedTensor>& parts);
// Throws UsageError, as `call`, where parts are of a whole of another shape, or do not cover all elements of `own`.
void require_covered(const char* call, const OwnPart& own, const GivenParts& given);
void copy_parts(const OwnPart& own, const GivenParts& given);

}  // namespace ds::loops
