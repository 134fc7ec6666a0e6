// A point in the order of a device's work, and whether the device has come to it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>

namespace ds {

// Copyable; copies are the same point. Any thread may ask: it is put on the device for that, because CUDA makes a
// context on the current device of a thread that asks about an event of another one.
class StreamPoint {
 public:
  StreamPoint() = default;  // reached already
  // The point after all work that the calling thread's current stream on `device` was given. On the CPU: reached
  // already.
  static StreamPoint here(c10::Device device);

  bool reached() const;
  // Makes the host wait for the point.
  void wait_on_host() const;
  // Makes all work that the current stream on the device is given from now on wait for the point; the host does not
  // wait.
  void wait_on_device() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace ds
