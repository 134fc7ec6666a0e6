#include "dsengine/fused_optimizers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace ds {
namespace {

// The tensors of one call of the kernel, which share device, dtype and number of steps.
struct Batch {
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

using Batches = std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType, int64_t>, Batch>;

// The kernel reads memory in a row, whatever the strides: all that it takes has the parameter's.
at::Tensor in_layout_of(const at::Tensor& parameter, const at::Tensor& values) {
  if (values.strides() == parameter.strides()) return values;
  const at::Tensor copy = at::empty_strided(parameter.sizes(), parameter.strides(), values.options());
  return copy.copy_(values);
}

// Its state, begun as torch begins it.
template <class State, class States>
State& state_of(States& states, const at::Tensor& parameter, bool amsgrad) {
  void* const key = parameter.unsafeGetTensorImpl();
  auto& state = states[key];
  if (!state) state = std::make_unique<State>();
  auto& own = static_cast<State&>(*state);
  const auto begin = [&](at::Tensor& moment) {
    moment = moment.defined() ? in_layout_of(parameter, moment) : at::zeros_like(parameter, at::MemoryFormat::Preserve);
  };
  begin(own.exp_avg());
  begin(own.exp_avg_sq());
  if (amsgrad) begin(own.max_exp_avg_sq());
  return own;
}

template <class State, class States>
Batches batches_of(States& states, const std::vector<at::Tensor>& parameters, bool amsgrad) {
  Batches batches;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    TORCH_CHECK(!gradient.is_sparse(), "Adam does not support sparse gradients");
    TORCH_CHECK(parameter.is_non_overlapping_and_dense(),
                "FusedAdam: expected parameters whose elements lie in memory ", "without gaps, found one of shape ",
                parameter.sizes(), " with strides ", parameter.strides(),
                "; give it a contiguous copy, or use torch::optim::Adam");
    auto& state = state_of<State>(states, parameter, amsgrad);
    state.step(state.step() + 1);
    if (parameter.numel() == 0) {  // a slice of which this rank has nothing: fully_shard sees steps by what they change
      at::Tensor(parameter).zero_();
      continue;
    }
    const c10::Device device = parameter.device();
    Batch& batch = batches[{device.type(), device.index(), parameter.scalar_type(), state.step()}];
    if (batch.parameters.empty()) {
      batch.steps = {at::full({}, static_cast<double>(state.step()), at::TensorOptions(at::kFloat).device(device))};
    }
    batch.parameters.push_back(parameter);
    batch.gradients.push_back(in_layout_of(parameter, gradient));
    batch.exp_avgs.push_back(state.exp_avg());
    batch.exp_avg_sqs.push_back(state.exp_avg_sq());
    if (amsgrad) batch.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
  }
  for (auto& [kind, batch] : batches) batch.steps.resize(batch.parameters.size(), batch.steps.front());
  return batches;
}

template <class Options, class State, class Optimizer, class Closure, class Kernel>
at::Tensor step_with(Optimizer& optimizer, const Closure& closure, const Kernel& kernel) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    const auto [beta1, beta2] = options.betas();
    for (auto& [kind, batch] : batches_of<State>(optimizer.state(), group.params(), options.amsgrad())) {
      kernel(batch.parameters, batch.gradients, batch.exp_avgs, batch.exp_avg_sqs, batch.max_exp_avg_sqs, batch.steps,
             options.lr(), beta1, beta2, options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false,
             /*grad_scale=*/std::nullopt, /*found_inf=*/std::nullopt);
    }
  }
  return loss;
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  return step_with<torch::optim::AdamOptions, torch::optim::AdamParamState>(
      *this, closure, [](auto&&... given) { at::_fused_adam_(std::forward<decltype(given)>(given)...); });
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  return step_with<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(
      *this, closure, [](auto&&... given) { at::_fused_adamw_(std::forward<decltype(given)>(given)...); });
}

}  // namespace ds
