// Differentiable conversions between plain tensors, parts and sums of parts. Collective.
//
// Plain means replicated: the same tensor on every rank of the axis, its gradient complete on each. Every conversion
// keeps this, and its backward pass is another one of them, so that gradients of gradients are right too. f and g of
// Megatron-LM (arXiv:1909.08053) are `used_in_part` and `summed`; those of sequence parallelism (arXiv:2205.05198)
// `joined_for_parts` and `summed_to_part`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/split/split_tensor.h"

namespace ds::parallel {

// Cuts this rank's part out of a plain tensor. Backward: all-gather. May share the tensor's memory.
at::Tensor sliced(const at::Tensor& plain, const Placement& placement);
// The plain whole of parts. Backward: the slice.
at::Tensor joined(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes);
// The plain sum of what each rank has. Backward: a copy.
at::Tensor summed(const at::Tensor& addend, const std::shared_ptr<SplitAxis>& axis);
// A plain tensor where each rank's use of it gives a part of its gradient. Backward: all-reduce.
at::Tensor used_in_part(const at::Tensor& plain, const std::shared_ptr<SplitAxis>& axis);
// The plain whole of parts for such a use. Backward: reduce-scatter.
at::Tensor joined_for_parts(const at::Tensor& part, const Placement& placement, c10::IntArrayRef sizes);
// A part of the sum of what each rank has. Backward: all-gather.
at::Tensor summed_to_part(const at::Tensor& addend, const Placement& placement);
// Converts a summed tensor for a use that gives each rank the whole gradient. Backward: one T-th of it.
at::Tensor shared_out(const at::Tensor& tensor, const std::shared_ptr<SplitAxis>& axis);
// Cuts this rank's part out of a summed tensor. Backward: zeros around it. No collective. May share the tensor's
// memory.
at::Tensor sliced_of_summed(const at::Tensor& tensor, const Placement& placement);
// The sum of what each rank has, for a use of it that gives each rank a part of its gradient. Backward: the same.
at::Tensor summed_for_parts(const at::Tensor& addend, const std::shared_ptr<SplitAxis>& axis);
// How many rows of dimension 0 a rank sends to each rank, and receives from each; empty: equally many.
struct RowSplits {
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
};
// The rows that the ranks send to this one, in rank order. Backward: the same, back.
at::Tensor rows_exchanged(const at::Tensor& rows, const std::shared_ptr<SplitAxis>& axis, const RowSplits& splits);
// Parts along another dimension, or in other blocks of the same one. Backward: the same, back.
at::Tensor exchanged(const at::Tensor& part, const Placement& from, const Cut& to, c10::IntArrayRef sizes);

// Gathers the full plain tensor, with its history, of a split or a summed one; returns other tensors as they are.
at::Tensor whole_of(const at::Tensor& tensor);

}  // namespace ds::parallel
