#include "offload/update_copies.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "core/check.h"

namespace ds::offload {

WriteBack::WriteBack(at::Device device, std::vector<at::Tensor> buffers) : stream_(device) {
  ensure(!buffers.empty(), "weights are written back through at least one buffer");
  for (at::Tensor& buffer : buffers) buffers_.push_back({std::move(buffer), {}});
}

void WriteBack::send(const at::Tensor& to, const std::function<void(const at::Tensor& buffer)>& fill) {
  Buffer& buffer = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  stream_.wait_on_host(buffer.sent);
  const at::Tensor weights = buffer.memory.narrow(0, 0, to.numel());
  fill(weights);
  buffer.sent = stream_.copy(to, weights);
  stream_.wait_on_device(buffer.sent);
}

void UndoCopy::keep(std::vector<at::Tensor> tensors) {
  ensure(!holds() && tensors.size() == memory_.size(), "an undo copy has memory for as many tensors as it keeps");
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    ensure(tensors[i].numel() == memory_[i].numel() && tensors[i].scalar_type() == memory_[i].scalar_type(),
           "an undo copy is like the tensor it keeps");
    memory_[i].copy_(tensors[i]);
  }
  kept_ = std::move(tensors);
}

void UndoCopy::restore() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < kept_.size(); ++i) kept_[i].copy_(memory_[i]);
  forget();
}

}  // namespace ds::offload
