// Indices into a dimension that is cut: which of them a rank has.
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// The one range of the cut dimension that this rank has; nothing where its part is several.
std::optional<DimRange> own_range(const Call& call, const Operand& x);
// The last rank has the least.
bool every_rank_has_some(const Call& call, const Operand& x);

struct OwnIndices {
  at::Tensor indices;    // from the range's begin; 0 for those of other ranks
  at::Tensor elsewhere;  // whether another rank has it
};
// Throws, on a GPU asynchronously, when an index is out of range and not `ignored` (undefined: none is): a rank would
// take it for one that another rank has.
void require_in_range(const at::Tensor& indices, int64_t extent, const at::Tensor& ignored);
OwnIndices own_indices(const at::Tensor& indices, const DimRange& range);

}  // namespace ds::parallel
