#include "optim/lion.h"

#include "optim/slice_update.h"

namespace ds::optim {

void Lion::allocate_states(int64_t index) { exp_avg_.push_back(allocate_state(slice(index).master)); }

void Lion::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = groups_[static_cast<size_t>(slice.group)];
  const at::Tensor& exp_avg = exp_avg_[static_cast<size_t>(index)];
  for_each_chunk(slice.master, gradient, KernelMemory::kTemporaries,
                 [&](int64_t begin, const at::Tensor& m, const at::Tensor& g) {
                   if (gradient_scale != 1.0) g.mul_(gradient_scale);
                   const at::Tensor momentum = exp_avg.narrow(0, begin, m.numel());
                   const at::Tensor direction = momentum.mul(group.beta1).add_(g, 1 - group.beta1).sign_();
                   if (group.weight_decay != 0.0) m.mul_(1 - group.lr * group.weight_decay);
                   m.add_(direction, -group.lr);
                   momentum.mul_(group.beta2).add_(g, 1 - group.beta2);
                 });
}

NamedStates Lion::states(int64_t index) { return {{"exp_avg", exp_avg_.at(static_cast<size_t>(index))}}; }

}  // namespace ds::optim
