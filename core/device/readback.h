// Numbers of a device that are copied to the host, which reads them later.
#pragma once

#include <ATen/core/Tensor.h>

#include "core/device/stream_point.h"

namespace ds {

// Movable and copyable; copies are the same numbers. One thread at a time.
class Readback {
 public:
  Readback() = default;  // has no numbers
  // Begins the copy, after what the current stream was given. `numbers` may be freed or changed afterwards by what that
  // stream is given later; on the CPU they are the numbers themselves.
  explicit Readback(const at::Tensor& numbers);

  bool defined() const { return host_.defined(); }
  // Whether numbers() would not wait.
  bool arrived() const { return arrived_.reached(); }
  // Waits for the numbers to arrive.
  const at::Tensor& numbers() const;

 private:
  at::Tensor host_;
  StreamPoint arrived_;
};

// A copy of `numbers`, which are the host's, on the device; the host does not wait for it.
at::Tensor sent_to(at::Device device, const at::Tensor& numbers);

}  // namespace ds
