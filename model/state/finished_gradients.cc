#include "model/state/finished_gradients.h"

#include <ATen/core/grad_mode.h>

#include <functional>

namespace ds::engine {
namespace {

void for_each_sum(const ModelState& state, const std::function<void(const GradientSum& sum, const at::Tensor&)>& use) {
  const at::NoGradGuard no_grad;
  for (const Axis& axis : state.axes->list) {
    for (const GradientSum& sum : axis.sums) {
      const at::Tensor gradient = state.gradients.reducer->gradient(sum.bucket);
      if (gradient.defined()) use(sum, gradient);
    }
  }
}

}  // namespace

void add_up(const at::Tensor& gradient, comm::Communicator& ranks, c10::Device device, const std::string& label) {
  const at::Tensor wire = gradient.to(device);
  ranks.all_reduce(wire, comm::ReduceOp::kSum, label).wait();
  if (!wire.is_same(gradient)) at::Tensor(gradient).copy_(wire);
}

void finish_gradients(const ModelState& state) {
  state.gradients.reducer->finish();
  if (state.axes->summed) return;
  for_each_sum(state, [&](const GradientSum& sum, const at::Tensor& gradient) {
    add_up(gradient, *sum.ranks, state.ranks.device, sum.label);
  });
  state.axes->summed = true;
}

void go_on_with_gradients(const ModelState& state) {
  if (!state.axes->summed) return;
  for_each_sum(state, [&](const GradientSum& sum, const at::Tensor& gradient) {
    at::Tensor(gradient).div_(static_cast<double>(sum.ranks->size()));
  });
  state.axes->summed = false;
}

void forget_gradients(const ModelState& state) {
  state.gradients.reducer->reset();
  state.axes->summed = false;
}

void release_gradients(const ModelState& state) {
  state.gradients.reducer->release_buffers();
  state.axes->summed = false;
}

std::vector<int64_t> parameters_without_gradient(const ModelState& state) {
  std::vector<int64_t> missing = state.gradients.reducer->parameters_without_gradient();
  std::erase_if(missing, [&](int64_t index) { return state.is_held_still(index); });
  return missing;
}

}  // namespace ds::engine
