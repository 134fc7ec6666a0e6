#include "core/device/transfer_stream.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"

namespace ds {
namespace {

void check_ends(const at::Tensor& to, const at::Tensor& from) {
  ensure(to.sizes() == from.sizes(), "both ends of a transfer have the same sizes");
  ensure(to.is_contiguous() && from.is_contiguous(), "both ends of a transfer are contiguous");
}

}  // namespace

TransferStream::TransferStream(at::Device device) : device_(device) {
  if (device_.is_cpu()) return;
  const c10::impl::VirtualGuardImpl impl(device_.type());
  if (!device_.has_index()) device_ = impl.getDevice();
  stream_ = impl.getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
}

TransferStream::~TransferStream() {
  if (!stream_) return;
  try {
    stream_->synchronize();
  } catch (const std::exception& error) {
    log::warning("offload: copies on ", device_.str(), " did not end well: ", without_stack(error.what()));
  }
}

TransferStream::Mark TransferStream::copy(const at::Tensor& to, const at::Tensor& from) {
  return start(to, from, /*kept=*/false);
}

TransferStream::Mark TransferStream::copy_of_kept(const at::Tensor& to, const at::Tensor& from) {
  return start(to, from, /*kept=*/true);
}

TransferStream::Mark TransferStream::start(const at::Tensor& to, const at::Tensor& from, bool kept) {
  check_ends(to, from);
  const at::NoGradGuard no_grad;
  if (!stream_) {
    to.copy_(from);
    return {};
  }
  const c10::impl::VirtualGuardImpl impl(device_.type());
  c10::Event given(device_.type());
  given.record(impl.getStream(device_));
  given.block(*stream_);
  for (const at::Tensor* tensor : {&to, &from}) {
    if (!kept && tensor->device() == device_) impl.recordDataPtrOnStream(tensor->storage().data_ptr(), *stream_);
  }
  const c10::StreamGuard guard(*stream_);
  to.copy_(from, /*non_blocking=*/true);
  Mark mark;
  mark.event_ = std::make_shared<c10::Event>(device_.type());
  mark.event_->record(*stream_);
  return mark;
}

at::Tensor TransferStream::upload(const at::Tensor& host) {
  if (!stream_ || !host.is_cpu() || host.requires_grad() || host.layout() != at::kStrided) return host.to(device_);
  const at::NoGradGuard no_grad;
  const c10::impl::VirtualGuardImpl impl(device_.type());
  const c10::Stream current = impl.getStream(device_);
  // LibTorch's allocator of pinned memory does not give it out again before the copy is done.
  const at::Tensor pinned = at::empty_like(host, host.options().pinned_memory(true)).copy_(host);
  at::Tensor result;
  c10::Event arrived(device_.type());
  {
    const c10::StreamGuard guard(*stream_);  // the memory belongs to this stream, and needs to wait for no other
    result = pinned.to(device_, /*non_blocking=*/true);
    arrived.record(*stream_);
  }
  arrived.block(current);
  impl.recordDataPtrOnStream(result.storage().data_ptr(), current);
  return result;
}

// CUDA makes a context on the current device of a thread that asks for an event: half a gigabyte of device 0 for each
// rank whose worker thread has chosen none.
void TransferStream::wait_on_host(Mark& mark) {
  if (mark.event_) {
    const c10::DeviceGuard guard(mark.event_->device());
    mark.event_->synchronize();
  }
  mark = {};
}

void TransferStream::wait_on_device(const Mark& mark) {
  if (mark.event_) mark.event_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

c10::OptionalStreamGuard TransferStream::as_current() const {
  return stream_ ? c10::OptionalStreamGuard(*stream_) : c10::OptionalStreamGuard();
}

}  // namespace ds
