#include "compression/onebit_adam.h"

#include <cmath>
#include <utility>

#include "compression/bucket_exchange.h"
#include "compression/frozen_variance.h"
#include "optim/adam.h"

namespace ds::compression {

OneBitAdam::OneBitAdam(std::vector<optimizers::GroupOptions> groups, OneBitAdamRule rule,
                       comm::Communicator& communicator)
    : CompressedOptimizer(std::move(groups), communicator), rule_(rule) {
  require_freeze_step(rule.freeze_step, rule.deepspeed_semantics);
}

void OneBitAdam::allocate_slice_states(int64_t /*index*/, const optimizers::NewState& new_state) {
  states_.push_back({new_state(), new_state()});
}

void OneBitAdam::advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  const bool local = is_local(step_count_);
  if (local && !step_group(slice(index)).non_freeze) {
    advance_frozen(index, gradient, gradient_scale);
    if (copy.defined()) at::Tensor(copy).copy_(slice(index).master);
  } else {
    advance_dense(index, local ? exchange(index).reduce_gradient(gradient) : gradient, gradient_scale, copy);
  }
}

void OneBitAdam::advance_dense(int64_t index, const at::Tensor& gradient, double gradient_scale,
                               const at::Tensor& copy) {
  const optimizers::Slice& own = slice(index);
  const State& state = states_[static_cast<size_t>(index)];
  // DeepSpeed's first step only makes its buffers.
  if (rule_.deepspeed_semantics && step_count_ == 1) {
    if (copy.defined()) at::Tensor(copy).copy_(own.master);
    return;
  }
  const optimizers::AdamRule rule{.decoupled_weight_decay = true, .bias_correction = corrects_bias(), .amsgrad = false};
  optimizers::update_adam_slice(own.master, gradient, {step_count_, gradient_scale, step_group(own), rule},
                                {.exp_avg = state.exp_avg, .exp_avg_sq = state.exp_avg_sq, .max_exp_avg_sq = {}}, copy);
}

void OneBitAdam::advance_frozen(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const optimizers::Slice& own = slice(index);
  const optimizers::GroupOptions& group = step_group(own);
  const State& state = states_[static_cast<size_t>(index)];
  if (!rule_.deepspeed_semantics) exchange(index).hold_without_variance(state.exp_avg_sq);
  exchange(index).exchange_average(state.exp_avg, gradient, gradient_scale, group.beta1);
  FrozenStep step;
  if (corrects_bias()) {
    step.average_correction = 1 - std::pow(group.beta1, step_count_);
    step.variance_correction = 1 - std::pow(group.beta2, rule_.freeze_step);
  }
  apply_frozen(own.master, state.exp_avg, state.exp_avg_sq, group, step);
}

optimizers::NamedStates OneBitAdam::states(int64_t index) {
  const State& state = states_.at(static_cast<size_t>(index));
  return {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}};
}

}  // namespace ds::compression
