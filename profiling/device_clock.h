// The time at which a device comes to what it is given, as the host's time where there is none.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>

namespace ds::profiling {

// The clock of one device. Not thread safe.
class DeviceClock {
 public:
  // A moment of the clock. Copyable; copies are the same moment.
  class Moment {
   public:
    Moment() = default;

   private:
    friend class DeviceClock;
    double seconds_ = 0;
    std::shared_ptr<c10::Event> event_;  // null: the host's
  };

  explicit DeviceClock(c10::Device device) : device_(device) {}

  // The moment when the device has done what the calling thread's current stream was given so far; the host does not
  // wait for it. On the CPU: now.
  Moment mark() const;
  // Whether the device has passed it; true for the host's.
  static bool passed(const Moment& moment);
  // The seconds between two moments of one clock. Waits until the device has passed both.
  static double seconds(const Moment& from, const Moment& to);

 private:
  c10::Device device_;
};

}  // namespace ds::profiling
