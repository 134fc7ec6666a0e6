// Runs of elements that this rank has of tensors of the whole model, and parts that other ranks have written of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/split/tensor_part.h"
#include "dsengine/fully_shard.h"

namespace ds::loops {

class ShardedModel;

struct OwnPart {
  std::string name;
  std::vector<int64_t> sizes;                        // of the whole
  int64_t offset = 0;                                // in the flattened whole, or in what `part` has of it
  at::Tensor values;                                 // flat, shares memory with what it is a part of
  std::shared_ptr<const TensorPart> part = nullptr;  // of a parameter that is split over a tensor axis
};

// Of trained and frozen parameters; of a frozen one that has no slices the whole.
std::vector<OwnPart> own_parts(const ShardedModel& model);
// As runs that lie together in the whole, with offsets there.
std::vector<OwnPart> runs_of(const OwnPart& own);
// Its elements of a whole tensor, flat.
at::Tensor elements_of(const OwnPart& own, const at::Tensor& whole);

using GivenParts = std::unordered_map<std::string, std::vector<const ShardedTensor*>>;

// By name; they point into `parts`.
GivenParts given_parts(const std::vector<ShardedTensor>& parts);
// Throws UsageError, as `call`, where parts are of a whole of another shape, or do not cover all elements of `own`. Of
// runs, as copy_parts().
void require_covered(const char* call, const OwnPart& own, const GivenParts& given);
void copy_parts(const OwnPart& own, const GivenParts& given);

}  // namespace ds::loops
