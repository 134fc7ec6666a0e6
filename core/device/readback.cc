#include "core/device/readback.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

namespace ds {
namespace {

at::Tensor pinned_like(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true));
}

}  // namespace

Readback::Readback(const at::Tensor& numbers) : host_(numbers) {
  if (!numbers.defined() || numbers.is_cpu()) return;
  const at::NoGradGuard no_grad;
  host_ = pinned_like(numbers);
  host_.copy_(numbers, /*non_blocking=*/true);
  arrived_ = StreamPoint::here(numbers.device());
}

const at::Tensor& Readback::numbers() const {
  arrived_.wait_on_host();
  return host_;
}

at::Tensor sent_to(at::Device device, const at::Tensor& numbers) {
  if (device.is_cpu()) return numbers;
  const at::NoGradGuard no_grad;
  // LibTorch's allocator of pinned memory does not give it out again before the copy is done.
  return pinned_like(numbers).copy_(numbers).to(device, /*non_blocking=*/true);
}

}  // namespace ds
