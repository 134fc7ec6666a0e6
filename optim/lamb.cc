#include "optim/lamb.h"

#include <ATen/core/grad_mode.h>

#include <utility>

namespace ds::optimizers {

Lamb::Lamb(std::vector<GroupOptions> groups, LambRule rule) : ShardOptimizer(std::move(groups)), rule_(rule) {
  require_lamb_rule(rule);
}

void Lamb::allocate_states(int64_t index) {
  const at::Tensor exp_avg = new_state(index);
  states_.push_back(make_lamb_state(slice(index), exp_avg, new_state(index), "Lamb"));
}

void Lamb::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const at::NoGradGuard no_grad;
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  const LambState& state = states_[static_cast<size_t>(index)];
  const at::Tensor squares = advance_lamb(slice, state, rule_, group, gradient, gradient_scale);
  apply_lamb(slice, state, rule_, group, lamb_coefficients(rule_, squares),
             lamb_step_size(rule_, group, step_count_, step_count_));
}

NamedStates Lamb::states(int64_t index) {
  const LambState& state = states_.at(static_cast<size_t>(index));
  return {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}};
}

}  // namespace ds::optimizers
