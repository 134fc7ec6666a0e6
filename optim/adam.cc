#include "optim/adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "optim/chunked_update.h"
#include "optim/cpu_update.h"
#include "optim/device_update.h"
#include "optim/kernels/adam_kernel.h"

namespace ds::optimizers {
namespace {

at::TensorList maxima_of(const AdamStates& states) {
  return states.max_exp_avg_sq.defined() ? at::TensorList(states.max_exp_avg_sq) : at::TensorList();
}

void fused_adamw(const at::Tensor& master, const at::Tensor& gradient, const AdamStates& states, const AdamStep& step,
                 const at::Tensor& count, const std::optional<at::Tensor>& scale) {
  at::_fused_adamw_(master, gradient, states.exp_avg, states.exp_avg_sq, maxima_of(states), count, step.group.lr,
                    step.group.beta1, step.group.beta2, step.group.weight_decay, step.group.eps, step.rule.amsgrad,
                    /*maximize=*/false, scale);
}

void fused_adam(const at::Tensor& master, const at::Tensor& gradient, const AdamStates& states, const AdamStep& step,
                const at::Tensor& count, const std::optional<at::Tensor>& scale) {
  at::_fused_adam_(master, gradient, states.exp_avg, states.exp_avg_sq, maxima_of(states), count, step.group.lr,
                   step.group.beta1, step.group.beta2, step.group.weight_decay, step.group.eps, step.rule.amsgrad,
                   /*maximize=*/false, scale);
}

AdamCoefficients coefficients_of(const AdamStep& step) {
  const auto& [count, gradient_scale, group, rule] = step;
  const double bias1 = rule.bias_correction ? 1 - std::pow(group.beta1, count) : 1.0;
  const double bias2_sqrt = rule.bias_correction ? std::sqrt(1 - std::pow(group.beta2, count)) : 1.0;
  AdamCoefficients c;
  if (rule.decoupled_weight_decay) {
    c.master_decay = static_cast<float>(1 - group.lr * group.weight_decay);
  } else {
    c.l2 = static_cast<float>(group.weight_decay);
  }
  c.beta2 = static_cast<float>(group.beta2);
  c.gradient_share = static_cast<float>(1 - group.beta1);
  c.square_share = static_cast<float>(1 - group.beta2);
  c.step_size = static_cast<float>(group.lr * bias2_sqrt / bias1);
  c.eps = static_cast<float>(group.eps * bias2_sqrt);
  c.amsgrad = rule.amsgrad;
  return c;
}

// For masters that the vector kernel does not take.
void update_by_libtorch(const at::Tensor& master, const at::Tensor& gradient, const AdamStep& step,
                        const AdamStates& states) {
  // The kernels always correct the bias, by 1 - beta^step: at step infinity that is 1.
  const double kernel_step =
      step.rule.bias_correction ? static_cast<double>(step.count) : std::numeric_limits<double>::infinity();
  const at::Tensor count = fused_step(kernel_step, master.device());
  const std::optional<at::Tensor> scale = fused_grad_scale(step.gradient_scale, master);
  for_each_chunk(master, {states.exp_avg, states.exp_avg_sq, states.max_exp_avg_sq}, gradient, KernelMemory::kFused,
                 [&](const at::Tensor& m, const at::Tensor& g, const std::vector<at::Tensor>& own) {
                   const AdamStates chunk{.exp_avg = own[0], .exp_avg_sq = own[1], .max_exp_avg_sq = own[2]};
                   scale_wide(g, step.gradient_scale);
                   const auto kernel = step.rule.decoupled_weight_decay ? fused_adamw : fused_adam;
                   kernel(m, g, chunk, step, count, scale);
                 });
}

}  // namespace

AdamStates allocate_adam_states(const NewState& new_state, const AdamRule& rule) {
  AdamStates states{.exp_avg = new_state(), .exp_avg_sq = new_state(), .max_exp_avg_sq = {}};
  if (rule.amsgrad) states.max_exp_avg_sq = new_state();
  return states;
}

NamedStates named_adam_states(const AdamStates& states) {
  NamedStates named{{"exp_avg", states.exp_avg}, {"exp_avg_sq", states.exp_avg_sq}};
  if (states.max_exp_avg_sq.defined()) named.emplace_back("max_exp_avg_sq", states.max_exp_avg_sq);
  return named;
}

void update_adam_slice(const at::Tensor& master, const at::Tensor& gradient, const AdamStep& step,
                       const AdamStates& states, const at::Tensor& copy) {
  const AdamCoefficients coefficients = coefficients_of(step);
  update_slice(
      {master, {states.exp_avg, states.exp_avg_sq, states.max_exp_avg_sq}, gradient, step.gradient_scale, copy},
      [&](const SliceArrays& arrays, int64_t begin, int64_t end) { adam_kernel(coefficients, arrays, begin, end); },
      [&] { update_by_libtorch(master, gradient, step, states); });
}

std::pair<SliceTensors, AdamCoefficients> describe_adam_slice(const at::Tensor& master, const SliceUpdate& update,
                                                              const AdamStep& step, const AdamStates& states) {
  return {{master,
           {states.exp_avg, states.exp_avg_sq, states.max_exp_avg_sq},
           update.gradient,
           step.gradient_scale,
           update.copy},
          coefficients_of(step)};
}

Adam::Adam(std::vector<GroupOptions> groups, AdamRule rule) : CopyingOptimizer(std::move(groups)), rule_(rule) {
  for (const GroupOptions& group : groups_) {
    require<ConfigError>(!rule_.lazy || group.weight_decay == 0, "optimizer.params.weight_decay: expected 0 in every ",
                         "parameter group with SparseAdam, found ", group.weight_decay);
  }
}

// SparseAdam divides by sqrt(v) + eps and multiplies by sqrt(1 - beta2^t), where Adam's eps is added last.
GroupOptions Adam::options_of(const Slice& slice) const {
  GroupOptions group = step_group(slice);
  if (rule_.lazy && slice.row_width > 0) {
    group.eps /= std::sqrt(1 - std::pow(group.beta2, static_cast<double>(step_count_)));
  }
  return group;
}

void Adam::update_rows(int64_t index, const TableRows& gradients, double gradient_scale) {
  ensure(rule_.lazy, "Adam moves rows without a gradient, SparseAdam does not");
  Slice& slice = slices_.at(static_cast<size_t>(index));
  AdamStates& own = states_[static_cast<size_t>(index)];
  update_in_rows(slice, {&own.exp_avg, &own.exp_avg_sq}, gradients,
                 [&](const at::Tensor& gradient) { update(index, gradient, gradient_scale); });
}

void Adam::allocate_states(int64_t /*index*/, const NewState& new_state) {
  states_.push_back(allocate_adam_states(new_state, rule_));
}

void Adam::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  const Slice& slice = slice_for_update(index, gradient);
  update_adam_slice(slice.master, gradient, {step_count_, gradient_scale, options_of(slice), rule_},
                    states_[static_cast<size_t>(index)], copy);
}

void Adam::update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) {
  update_together(
      slices, scale, &UpdateDeviceKernels::adam,
      [&](const SliceUpdate& update) {
        const Slice& slice = slice_for_update(update.index, update.gradient);
        return describe_adam_slice(slice.master, update, {step_count_, scale.factor, options_of(slice), rule_},
                                   states_[static_cast<size_t>(update.index)]);
      },
      [&](const SliceUpdate& update) { update_into(update.index, update.gradient, scale.factor, update.copy); });
}

NamedStates Adam::states(int64_t index) { return named_adam_states(states_.at(static_cast<size_t>(index))); }

}  // namespace ds::optimizers
