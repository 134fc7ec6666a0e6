// Adagrad (jmlr.org/papers/v12/duchi11a.html) on arrays, with the arithmetic of LibTorch's fused CPU kernel:
//
//   g = g + l2 w      s = s + g^2      w = w - step_size g / (sqrt(s) + eps)
//
// Torch-free.
#pragma once

#include <cstdint>

#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

struct AdagradCoefficients {
  float l2 = 0.0F;          // weight decay
  float step_size = 1e-2F;  // lr / (1 + (t - 1) lr_decay)
  float eps = 1e-10F;
};

// Elements `begin` to `end` - 1. State: s.
void adagrad_kernel(const AdagradCoefficients& coefficients, const SliceArrays& arrays, int64_t begin, int64_t end);

}  // namespace ds::optimizers
