// Activations between stages whose layers are split over a tensor axis. They travel as this rank's own parts, plain
// tensors, to the rank of the next stage that has the same place along its own axis, which shows its layers the full
// sizes again. Nothing is gathered for that.
//
// A stage begins and ends at parts: the leaves of its inputs are parts, and backward starts at the parts of its
// outputs. Their gradients are parts too, and go back the same way. What is plain is the same on all ranks of the axis,
// and so is its gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/split/split_tensor.h"
#include "core/split/tensor_part.h"
#include "core/text.h"
#include "dsengine/layer_spec.h"

namespace ds::pipeline {

// How a split tensor lies on the ranks of an axis, whichever axis that is.
struct TensorSplit {
  std::vector<int64_t> sizes;  // of the full tensor
  std::optional<Cut> cut;      // none: every rank has the full tensor, and a partial sum of its gradient
  bool operator==(const TensorSplit&) const = default;
};
// How each of several tensors is split; empty for a plain one.
using TensorSplits = std::vector<std::optional<TensorSplit>>;

// Replaces the split tensors by their parts, with the history of these, and returns how they were split. `axis`: the
// axis of this rank's layers; null: they are not split. Throws UsageError, which begins with `place`, for a tensor that
// is split over other ranks.
TensorSplits take_parts(Tensors& tensors, const SplitAxis* axis, const Printable& place);

// Returns split tensors over `axis` for the parts of split ones, and the others as they are.
Tensors with_full_sizes(const Tensors& parts, const TensorSplits& splits, const std::shared_ptr<SplitAxis>& axis);

// Replaces split tensors by the full ones, without history. Collective over their axis where there are any.
void gather_values(Tensors& tensors);

}  // namespace ds::pipeline
