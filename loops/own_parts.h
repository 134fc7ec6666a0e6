// Runs of elements that this rank has of tensors of the full model, and parts that other ranks have written of them.
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
  std::vector<int64_t> sizes;                        // the sizes of the full tensor
  int64_t offset = 0;                                // in the flattened full tensor, or in what `part` has of it
  at::Tensor values;                                 // flat, shares memory with what it is a part of
  std::shared_ptr<const TensorPart> part = nullptr;  // set for a parameter that is split over a tensor axis
};

// The parts of trained and frozen parameters; all of a frozen one that has no slices.
std::vector<OwnPart> own_parts(const ShardedModel& model);
// The part as runs that lie together in the full tensor, with offsets there.
std::vector<OwnPart> runs_of(const OwnPart& own);
// The elements of a full tensor that the part covers, flat.
at::Tensor elements_of(const OwnPart& own, const at::Tensor& whole);

using GivenParts = std::unordered_map<std::string, std::vector<const ShardedTensor*>>;

// The parts by name; the result points into `parts`.
GivenParts given_parts(const std::vector<ShardedTensor>& parts);
// Throws UsageError, as `call`, where the given parts are of a full tensor of another shape, or do not cover all
// elements of `own`, which is a run; copy_parts() copies them.
void require_covered(const char* call, const OwnPart& own, const GivenParts& given);
void copy_parts(const OwnPart& own, const GivenParts& given);

}  // namespace ds::loops
