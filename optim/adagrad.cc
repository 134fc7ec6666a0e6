#include "optim/adagrad.h"

#include <ATen/ops/_fused_adagrad.h>

#include <utility>

#include "core/check.h"
#include "optim/chunked_update.h"
#include "optim/cpu_update.h"
#include "optim/device_update.h"
#include "optim/kernels/adagrad_kernel.h"

namespace ds::optimizers {

Adagrad::Adagrad(std::vector<GroupOptions> groups, AdagradRule rule)
    : CopyingOptimizer(std::move(groups)), rule_(rule) {
  require<ConfigError>(rule.lr_decay >= 0, "optimizer.params.lr_decay: expected at least 0, found ", rule.lr_decay);
  require<ConfigError>(rule.initial_accumulator_value >= 0,
                       "optimizer.params.initial_accumulator_value: expected at least 0, found ",
                       rule.initial_accumulator_value);
}

void Adagrad::allocate_states(int64_t /*index*/, const NewState& new_state) {
  sum_.push_back(new_state());
  if (rule_.initial_accumulator_value != 0.0) sum_.back().fill_(rule_.initial_accumulator_value);
}

AdagradCoefficients Adagrad::coefficients_of(const GroupOptions& group) const {
  const auto step = static_cast<double>(step_count_);
  return {.l2 = static_cast<float>(group.weight_decay),
          .step_size = static_cast<float>(group.lr / (1 + (step - 1) * rule_.lr_decay)),
          .eps = static_cast<float>(group.eps)};
}

void Adagrad::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  const at::Tensor& sum = sum_[static_cast<size_t>(index)];
  const AdagradCoefficients coefficients = coefficients_of(group);
  const auto by_libtorch = [&] {
    const at::Tensor state_step = fused_step(static_cast<double>(step_count_), slice.master.device());
    const std::optional<at::Tensor> scale = fused_grad_scale(gradient_scale, slice.master);
    for_each_chunk(slice.master, {sum}, gradient, KernelMemory::kFused,
                   [&](const at::Tensor& m, const at::Tensor& g, const std::vector<at::Tensor>& states) {
                     scale_wide(g, gradient_scale);
                     at::_fused_adagrad_(m, g, states[0], state_step, group.lr, rule_.lr_decay, group.weight_decay,
                                         group.eps, /*maximize=*/false, scale);
                   });
  };
  update_slice(
      {slice.master, {sum}, gradient, gradient_scale, copy},
      [&](const SliceArrays& arrays, int64_t begin, int64_t end) { adagrad_kernel(coefficients, arrays, begin, end); },
      by_libtorch);
}

void Adagrad::update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) {
  update_together(
      slices, scale, &UpdateDeviceKernels::adagrad,
      [&](const SliceUpdate& update) {
        const Slice& slice = slice_for_update(update.index, update.gradient);
        return std::pair(
            SliceTensors{
                slice.master, {sum_[static_cast<size_t>(update.index)]}, update.gradient, scale.factor, update.copy},
            coefficients_of(step_group(slice)));
      },
      [&](const SliceUpdate& update) { update_into(update.index, update.gradient, scale.factor, update.copy); });
}

void Adagrad::update_rows(int64_t index, const TableRows& gradients, double gradient_scale) {
  Slice& slice = slices_.at(static_cast<size_t>(index));
  update_in_rows(slice, {&sum_[static_cast<size_t>(index)]}, gradients,
                 [&](const at::Tensor& gradient) { update(index, gradient, gradient_scale); });
}

NamedStates Adagrad::states(int64_t index) { return {{"sum", sum_.at(static_cast<size_t>(index))}}; }

}  // namespace ds::optimizers
