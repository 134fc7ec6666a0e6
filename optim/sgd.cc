#include "optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/check.h"
#include "optim/chunked_update.h"
#include "optim/device_update.h"

namespace ds::optimizers {

Sgd::Sgd(std::vector<GroupOptions> groups, SgdRule rule) : SliceOptimizer(std::move(groups)), rule_(rule) {
  for (const GroupOptions& group : groups_) {
    has_momentum_ = has_momentum_ || group.momentum != 0.0;
    require<ConfigError>(!rule_.nesterov || (group.momentum > 0.0 && rule_.dampening == 0.0),
                         "optimizer.params.nesterov: expected a momentum above 0 and dampening 0, found momentum ",
                         group.momentum, " and dampening ", rule_.dampening);
  }
}

void Sgd::allocate_states(int64_t /*index*/, const NewState& new_state) {
  momentum_.push_back(has_momentum_ ? new_state() : at::Tensor());
}

const GroupOptions& Sgd::checked_group(const Slice& slice) const {
  const GroupOptions& group = step_group(slice);
  require(has_momentum_ || group.momentum == 0.0, "SGD: group ", slice.group, " was made without momentum, found ",
          group.momentum, " (give the momentum when the optimizer is made)");
  return group;
}

void Sgd::update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) {
  // A state of a group whose momentum is 0 stays as it is, for the step that raises it.
  const auto update_those = [&](bool with_momentum) {
    std::vector<SliceUpdate> chosen;
    std::copy_if(slices.begin(), slices.end(), std::back_inserter(chosen), [&](const SliceUpdate& update) {
      return (checked_group(slice_for_update(update.index, update.gradient)).momentum != 0.0) == with_momentum;
    });
    update_together(
        chosen, scale, &UpdateDeviceKernels::sgd,
        [&](const SliceUpdate& update) {
          const Slice& own = slice(update.index);
          const GroupOptions& group = checked_group(own);
          const at::Tensor state = with_momentum ? momentum_[static_cast<size_t>(update.index)] : at::Tensor();
          return std::pair(SliceTensors{own.master, {state}, update.gradient, scale.factor, update.copy},
                           SgdCoefficients{.l2 = static_cast<float>(group.weight_decay),
                                           .lr = static_cast<float>(group.lr),
                                           .momentum = static_cast<float>(group.momentum),
                                           .share = static_cast<float>(1 - rule_.dampening),
                                           .nesterov = rule_.nesterov,
                                           .first = step_count_ == 1});
        },
        [&](const SliceUpdate& update) {
          SliceOptimizer::update_all({update}, {.factor = scale.factor, .device_factor = {}, .skip = {}});
        });
  };
  update_those(false);
  update_those(true);
}

void Sgd::update(int64_t index, const at::Tensor& gradient, double gradient_scale) {
  const Slice& slice = slice_for_update(index, gradient);
  const GroupOptions& group = checked_group(slice);
  const at::Tensor& momentum = momentum_[static_cast<size_t>(index)];
  const std::optional<at::Tensor> scale = fused_grad_scale(gradient_scale, slice.master);
  const bool first = step_count_ == 1;
  for_each_chunk(slice.master, {group.momentum != 0.0 ? momentum : at::Tensor()}, gradient, KernelMemory::kFused,
                 [&](const at::Tensor& m, const at::Tensor& g, const std::vector<at::Tensor>& states) {
                   const at::Tensor& own = states[0];
                   scale_wide(g, gradient_scale);
                   at::_fused_sgd_(m, g, own.defined() ? at::TensorList(own) : at::TensorList(), group.weight_decay,
                                   group.momentum, group.lr, rule_.dampening, rule_.nesterov, /*maximize=*/false,
                                   /*is_first_step=*/first, scale);
                 });
}

void Sgd::update_rows(int64_t index, const TableRows& gradients, double gradient_scale) {
  Slice& slice = slices_.at(static_cast<size_t>(index));
  update_in_rows(slice, {}, gradients, [&](const at::Tensor& gradient) { update(index, gradient, gradient_scale); });
}

NamedStates Sgd::states(int64_t index) {
  const at::Tensor& momentum = momentum_.at(static_cast<size_t>(index));
  return momentum.defined() ? NamedStates{{"momentum_buffer", momentum}} : NamedStates{};
}

}  // namespace ds::optimizers
