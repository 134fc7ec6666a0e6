// The order in which gradients of one bucket are added.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::zero {

// Note [AdditionOrder]
// Gradients of micro-batches are added as they come: each is added to the sum of all before it. So the bits of a sum
// follow from the order of the passes, which all ranks share, and from how the passes are cut into reductions. That
// order is decided here and in what calls this:
//   * GradientBucket::collect: a pass's gradient to those of passes that are not reduced yet. Where the parameter's
//     gradient is a view of the bucket, autograd itself has added, in the same order;
//   * GradientBucket::set_aside: a reduced gradient to the sum of those reduced before. Slices that are kept elsewhere
//     are added there (ReducedGradients::add), in the order of the calls;
//   * GradientBucket::join_sum: that sum to what was reduced last.
// Another order (a fixed tree over micro-batches, say) takes the place of this function, and needs every gradient
// taken away from its parameter, so that autograd has nothing to add to.
inline void add_in_order(const at::Tensor& sum, const at::Tensor& gradient) { sum.add_(gradient); }

}  // namespace ds::zero
