#include "profiling/device_clock.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "profiling/meters.h"

namespace ds::profiling {

DeviceClock::Moment DeviceClock::mark() const {
  Moment moment;
  if (device_.is_cpu()) {
    moment.seconds_ = monotonic_seconds();
    return moment;
  }
  const c10::DeviceGuard guard(device_);
  moment.event_ = std::make_shared<c10::Event>(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // one with a time
  moment.event_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  return moment;
}

bool DeviceClock::passed(const Moment& moment) {
  if (!moment.event_) return true;
  const c10::DeviceGuard guard(moment.event_->device());
  return moment.event_->query();
}

double DeviceClock::seconds(const Moment& from, const Moment& to) {
  constexpr double kMillisecondsPerSecond = 1e3;
  if (!from.event_ || !to.event_) return to.seconds_ - from.seconds_;
  const c10::DeviceGuard guard(to.event_->device());
  from.event_->synchronize();
  to.event_->synchronize();
  return from.event_->elapsedTime(*to.event_) / kMillisecondsPerSecond;
}

}  // namespace ds::profiling
