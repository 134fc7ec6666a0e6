#include "loops/slice_leaves.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "zero/partition.h"

namespace ds::loops {

std::vector<SliceLeaf> slice_leaves(const engine::ModelState& state) {
  std::vector<SliceLeaf> leaves(state.parameters.size());
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::BucketLayout& layout = state.buckets[b].layout();
    for (const Segment& whole : layout.segments) {
      const auto parameter = static_cast<size_t>(whole.parameter);
      leaves[parameter] = {.name = state.parameters[parameter].name,
                           .parameter = parameter,
                           .bucket = b,
                           .place = {.parameter = whole.parameter},
                           .tensor = {}};
    }
    for (const Segment& own : zero::slice_segments(layout, state.groups_of(b).shards.rank())) {
      leaves[static_cast<size_t>(own.parameter)].place = own;
    }
  }
  for (SliceLeaf& leaf : leaves) {
    const at::Tensor part = state.masters[leaf.bucket].narrow(0, leaf.place.slice_offset, leaf.place.length).detach();
    leaf.tensor = part.set_requires_grad(true);
  }
  return leaves;
}

void SliceGradients::expect(size_t buckets, const at::TensorOptions& options) {
  of_pass_.assign(buckets, {});
  options_ = options;
}

void SliceGradients::add(size_t bucket, const at::Tensor& own) {
  const at::NoGradGuard no_grad;
  at::Tensor& sum = of_pass_[bucket];
  if (sum.defined()) {
    sum.add_(own.to(options_.device()));
    return;
  }
  sum = at::empty(own.sizes(), options_);
  sum.copy_(own);  // the reducer's memory is used again
}

void SliceGradients::clear() { of_pass_.assign(of_pass_.size(), {}); }

void SliceGradients::hand_out(const std::vector<SliceLeaf>& leaves, const std::vector<zero::Parameter>& parameters) {
  const at::NoGradGuard no_grad;
  for (const SliceLeaf& leaf : leaves) {
    const at::Tensor& made = of_pass_[leaf.bucket];
    if (!made.defined() || !parameters[leaf.parameter].tensor.requires_grad()) continue;
    // No view as autograd counts them: Optimizer::zero_grad() detaches gradients in place.
    const at::Tensor own = made.narrow(0, leaf.place.slice_offset, leaf.place.length).variable_data();
    at::Tensor& gradient = leaf.tensor.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(own);
    } else {
      gradient = own;
    }
  }
  clear();
}

}  // namespace ds::loops
