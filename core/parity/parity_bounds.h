// How far two right runs may be from one another. Torch-free.
//
// Note [Two orders of the same sums]
// Ranks add the same numbers up in another order than one rank does, and sums in another order round otherwise. How
// much that is depends on the model, the batch and the step; no constant is right for all. So the layout runs twice,
// the second time with its batches in another order, and the distance of these two runs is what rounding makes of the
// order here. The bounds are a multiple of it. Where the second run is the same to the bit (two numbers have one sum in
// either order), or trains something else (dropout hits other samples), there is no such measure. The bounds are then
// constants of the dtype, and the verdict says so and why.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/parity/recorded_run.h"

namespace ds {

// Relative differences.
struct ParityBounds {
  double loss = 0;
  double norm = 0;
  double gradient = 0;  // of the L2 norm of a parameter's gradient
  double update = 0;    // of the L2 norm of the change of its weights; Adam makes large ones of small gradients
};

// The bounds of the first step by the dtype of forward and backward alone.
ParityBounds bounds_of(const std::string& dtype);

struct ChosenBounds {
  std::vector<ParityBounds> steps;  // later steps may be further apart, since each begins where the last has ended
  std::string source;               // where they come from, in words
};

// Chooses the bounds between `run` and `reference`. `other_order`: the second run of the layout of `run`; null: there
// is none, for the reason `why_none`. Throws IoError.
ChosenBounds choose_bounds(const RecordedRun& run, const RecordedRun& reference, const RecordedRun* other_order,
                           const std::string& why_none = "no second run was asked for");

}  // namespace ds
