#include "loops/slice_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace ds::loops {

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
