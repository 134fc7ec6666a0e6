// What a step multiplies its gradients by, and whether it changes anything at all.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::optimizers {

// The tensors, float32 [1] on the device, hold what only the device knows yet; undefined: 1, and the step is made.
struct StepScale {
  double factor = 1.0;
  at::Tensor device_factor;  // multiplied in
  at::Tensor skip;           // not zero: the step changes nothing
};

}  // namespace ds::optimizers
