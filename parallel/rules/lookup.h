// Rules for indices into a dimension that is cut (embedding, gather): which of the indices a rank has.
#pragma once

#include "parallel/rules/call.h"

namespace ds::parallel {

// Returns the one range of the cut dimension that this rank has; empty where its part consists of several ranges.
std::optional<DimRange> own_range(const Call& call, const Operand& x);
// Whether every rank has a part that is not empty; the last rank has the smallest.
bool every_rank_has_some(const Call& call, const Operand& x);

// The indices that this rank has.
struct OwnIndices {
  at::Tensor indices;    // counted from the begin of its range; 0 for those of other ranks
  at::Tensor elsewhere;  // by index: another rank has it
};
// Throws, on a GPU asynchronously, when an index is out of range and not `ignored` (undefined: none is). Without this a
// rank would take such an index for one that another rank has.
void require_in_range(const at::Tensor& indices, int64_t extent, const at::Tensor& ignored);
// Splits indices into those of this rank and of others.
OwnIndices own_indices(const at::Tensor& indices, const DimRange& range);

}  // namespace ds::parallel
