#include "core/device/stream_point.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ds {

StreamPoint StreamPoint::here(c10::Device device) {
  StreamPoint point;
  if (device.is_cpu()) return point;
  const c10::DeviceGuard guard(device);
  point.event_ = std::make_shared<c10::Event>(device.type());
  point.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return point;
}

bool StreamPoint::reached() const {
  if (!event_) return true;
  const c10::DeviceGuard guard(event_->device());
  return event_->query();
}

void StreamPoint::wait_on_host() const {
  if (!event_) return;
  const c10::DeviceGuard guard(event_->device());
  event_->synchronize();
}

void StreamPoint::wait_on_device() const {
  if (!event_) return;
  event_->block(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
}

}  // namespace ds
