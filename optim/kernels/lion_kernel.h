// Lion (arXiv 2302.06675) on arrays:
//
//   c = beta1 m + (1 - beta1) g      w = w master_decay - lr sign(c)      m = beta2 m + (1 - beta2) g
//
// The sign of 0 is 0, that of a NaN is NaN. Torch-free.
#pragma once

#include <cstdint>

#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

struct LionCoefficients {
  float master_decay = 1.0F;  // 1 - lr weight_decay
  float lr = 1e-4F;
  float beta1 = 0.9F;
  float beta2 = 0.99F;
  float share1 = 0.1F;   // 1 - beta1
  float share2 = 0.01F;  // 1 - beta2
};

// Elements `begin` to `end` - 1. State: m.
void lion_kernel(const LionCoefficients& coefficients, const SliceArrays& arrays, int64_t begin, int64_t end);

}  // namespace ds::optimizers
