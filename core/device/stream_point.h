// A point in what a device has been given: whether it has come so far.
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
  // After all that the calling thread's current stream on `device` was given. On the CPU: reached already.
  static StreamPoint here(c10::Device device);

  bool reached() const;
  // The host waits.
  void wait_on_host() const;
  // What the current stream on the device is given from now on comes after the point; the host does not wait.
  void wait_on_device() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

}  // namespace ds
