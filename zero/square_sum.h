// Sums of squares of the flat gradients of this rank. The norm over all ranks is model/state/global_norm.h, clipping by
// it optim/clip.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ds::zero {

// Returns the sum of the squares of all elements, accumulated in float64 in an order that does not depend on threads.
// Not finite when an element is not finite. Any floating dtype, any device; no copy of the whole tensor is made, on a
// device copies of 2^24 elements.
double sum_of_squares(const at::Tensor& flat);

// The same for several tensors. A device is waited for once, in total(); there sums of 65,536 elements are in float32,
// and those that are not finite then, though all elements are, are made again in float64.
class SquareSum {
 public:
  // Keeps a tensor of a device alive.
  void add(const at::Tensor& flat);
  double total() const;
  // The same on the device, which nobody waits for: float64 [1], zero where nothing was added; not finite also where
  // squares of a tensor of the device are beyond float32.
  at::Tensor total_on(at::Device device) const;

 private:
  double on_host_ = 0;
  std::vector<at::Tensor> on_device_;
  std::vector<at::Tensor> sums_;  // float64 [], of on_device_
};

// First element that is infinite or NaN, or -1.
int64_t first_non_finite(const at::Tensor& flat);

}  // namespace ds::zero
