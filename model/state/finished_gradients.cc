#include "model/state/finished_gradients.h"

#include <ATen/core/grad_mode.h>

#include <functional>

#include "core/text.h"

namespace ds::engine {
namespace {

// Where each rank of the tensor axis has a part of the gradient.
void for_each_summed(const ModelState& state, const std::function<void(size_t bucket, const at::Tensor&)>& use) {
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (!state.is_summed(b)) continue;
    const at::Tensor gradient = state.gradients.reducer->gradient(b);
    if (gradient.defined()) use(b, gradient);
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
  if (!state.tensor || !state.tensor->sums_wholes || state.tensor->gradients_summed) return;
  for_each_summed(state, [&](size_t b, const at::Tensor& gradient) {
    add_up(gradient, *state.tensor->ranks, state.ranks.device, cat("summed gradients of bucket ", b));
  });
  state.tensor->gradients_summed = true;
}

void go_on_with_gradients(const ModelState& state) {
  if (!state.tensor || !state.tensor->gradients_summed) return;
  for_each_summed(state, [&](size_t /*b*/, const at::Tensor& gradient) {
    at::Tensor(gradient).div_(static_cast<double>(state.tensor->ranks->size()));
  });
  state.tensor->gradients_summed = false;
}

void forget_gradients(const ModelState& state) {
  state.gradients.reducer->reset();
  if (state.tensor) state.tensor->gradients_summed = false;
}

void release_gradients(const ModelState& state) {
  state.gradients.reducer->release_buffers();
  if (state.tensor) state.tensor->gradients_summed = false;
}

}  // namespace ds::engine
