// The factor by which a step multiplies its gradients (the clip factor of optim/clip.h over the loss scale), and
// whether the step changes anything at all.
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::optimizers {

// Gradients are multiplied by `factor` times `device_factor`. The tensors are float32 [1] on the device and hold
// numbers that the host does not know yet.
struct StepScale {
  double factor = 1.0;
  at::Tensor device_factor;  // undefined: 1
  at::Tensor skip;           // the step changes nothing where it is not zero; undefined: zero
};

}  // namespace ds::optimizers
