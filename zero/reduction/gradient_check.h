// Finds a rank's first gradient that is not finite, before it is added to others or reduced.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ds::zero {

// Makes one pass over each gradient. The caller sees to it that calls do not overlap.
class GradientCheck {
 public:
  // `lazy`, for accelerators: nobody waits for them, what is found stays on `device` until first() asks. Else nothing
  // is looked at any more once something is found.
  GradientCheck(c10::Device device, bool lazy) : device_(device), lazy_(lazy) {}

  // Says which micro-batch the next gradients belong to; -1: the caller does not know.
  void begin_pass(int64_t micro_batch) { micro_batch_ = micro_batch; }
  // Checks one gradient as autograd has made it. The calls come in autograd's order: the gradient nearest to the loss
  // comes first.
  void see(int64_t parameter, const at::Tensor& gradient);

  struct Found {
    int64_t parameter = 0;
    int64_t micro_batch = 0;
  };
  // The first gradient since reset() that is not finite; nothing: all were. Waits for the device.
  std::optional<Found> first() const;
  void reset();

 private:
  c10::Device device_;
  bool lazy_;
  int64_t micro_batch_ = 0;
  std::optional<Found> found_;  // not lazy
  std::vector<Found> seen_;     // lazy: one for each gradient, in order
  at::Tensor first_;            // int64 [] on the device: the place in seen_ of the first that is not finite
};

}  // namespace ds::zero
