// Batches on their way from the thread that reads them to the device.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/check.h"
#include "core/device/transfer_stream.h"
#include "dsengine/read_ahead.h"

namespace ds::data {
namespace {

// Whether a tensor goes through pinned memory: one on the host, strided, that is no part of a graph.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && !tensor.requires_grad() && tensor.layout() == at::kStrided;
}

}  // namespace

struct Delivery::Parts {
  explicit Parts(at::Device to) : device(to), copies(to) {}

  at::Device device;
  TransferStream copies;
  bool stages = false;
  at::Device pins_for = at::kCPU;  // the accelerator whose context pinned memory belongs to
};

Delivery::Delivery(at::Device device, bool pin_memory) : parts_(std::make_unique<Parts>(device)) {
  parts_->stages = pin_memory || !device.is_cpu();
  if (!parts_->stages) return;
  if (device.is_cpu()) {
    require(at::hasCUDA(),
            "data loader: pin_memory needs an accelerator, found none; leave it out, or deliver to \"cpu\" without it");
    device = at::Device(at::kCUDA);
  }
  const c10::impl::VirtualGuardImpl impl(device.type());
  parts_->pins_for = device.has_index() ? device : impl.getDevice();
  if (!parts_->device.is_cpu()) parts_->device = parts_->pins_for;
}

Delivery::~Delivery() = default;

// CUDA makes a context on the current device of a thread that pins memory, which is the first device on a new thread.
at::Tensor Delivery::stage(const at::Tensor& tensor) const {
  if (!parts_->stages || !is_plain(tensor)) return tensor;
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(parts_->pins_for);
  return at::empty_like(tensor, tensor.options().pinned_memory(true)).copy_(tensor);
}

at::Tensor Delivery::deliver(const at::Tensor& staged) {
  if (!staged.defined() || parts_->device.is_cpu()) return staged;
  if (!is_plain(staged)) return parts_->copies.upload(staged);
  const at::NoGradGuard no_grad;
  const c10::impl::VirtualGuardImpl impl(parts_->device.type());
  const c10::Stream current = impl.getStream(parts_->device);
  at::Tensor result;
  c10::Event arrived(parts_->device.type());
  {
    const auto guard = parts_->copies.as_current();  // the memory belongs to the copies, and waits for nothing else
    result = staged.to(parts_->device, /*non_blocking=*/true);
    arrived.record(impl.getStream(parts_->device));
  }
  arrived.block(current);
  impl.recordDataPtrOnStream(result.storage().data_ptr(), current);
  return result;
}

}  // namespace ds::data
