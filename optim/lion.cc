#include "optim/lion.h"

#include <ATen/ops/where.h>

#include <utility>

#include "optim/chunked_update.h"
#include "optim/cpu_update.h"
#include "optim/device_update.h"
#include "optim/kernels/lion_kernel.h"

namespace ds::optimizers {
namespace {

double decay_of(const GroupOptions& group) { return 1 - group.lr * group.weight_decay; }

LionCoefficients coefficients_of(const GroupOptions& group) {
  return {.master_decay = static_cast<float>(decay_of(group)),
          .lr = static_cast<float>(group.lr),
          .beta1 = static_cast<float>(group.beta1),
          .beta2 = static_cast<float>(group.beta2),
          .share1 = static_cast<float>(1 - group.beta1),
          .share2 = static_cast<float>(1 - group.beta2)};
}

}  // namespace

void Lion::allocate_states(int64_t /*index*/, const NewState& new_state) { exp_avg_.push_back(new_state()); }

void Lion::update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) {
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = step_group(slice);
  const at::Tensor& exp_avg = exp_avg_[static_cast<size_t>(index)];
  const LionCoefficients coefficients = coefficients_of(group);
  const auto by_libtorch = [&] {
    for_each_chunk(slice.master, {exp_avg}, gradient, KernelMemory::kTemporaries,
                   [&](const at::Tensor& m, const at::Tensor& g, const std::vector<at::Tensor>& states) {
                     if (gradient_scale != 1.0) g.mul_(gradient_scale);
                     const at::Tensor& momentum = states[0];
                     const at::Tensor blend = momentum.mul(group.beta1).add_(g, 1 - group.beta1);
                     // LibTorch's sign of a NaN is 0, and the weight would not show that the step is none.
                     const at::Tensor direction = at::where(blend.isnan(), blend, blend.sign());
                     if (group.weight_decay != 0.0) m.mul_(decay_of(group));
                     m.add_(direction, -group.lr);
                     momentum.mul_(group.beta2).add_(g, 1 - group.beta2);
                   });
  };
  update_slice(
      {slice.master, {exp_avg}, gradient, gradient_scale, copy},
      [&](const SliceArrays& arrays, int64_t begin, int64_t end) { lion_kernel(coefficients, arrays, begin, end); },
      by_libtorch);
}

void Lion::update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) {
  update_together(
      slices, scale, &UpdateDeviceKernels::lion,
      [&](const SliceUpdate& update) {
        const Slice& slice = slice_for_update(update.index, update.gradient);
        return std::pair(SliceTensors{slice.master,
                                      {exp_avg_[static_cast<size_t>(update.index)]},
                                      update.gradient,
                                      scale.factor,
                                      update.copy},
                         coefficients_of(step_group(slice)));
      },
      [&](const SliceUpdate& update) { update_into(update.index, update.gradient, scale.factor, update.copy); });
}

NamedStates Lion::states(int64_t index) { return {{"exp_avg", exp_avg_.at(static_cast<size_t>(index))}}; }

}  // namespace ds::optimizers
