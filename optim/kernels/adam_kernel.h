// Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101) on arrays, with the arithmetic of LibTorch's fused CPU kernel:
//
//   w = w master_decay               AdamW: 1 - lr weight_decay
//   g = g + l2 w                     Adam with weight decay
//   m = m + (1 - beta1) (g - m)      v = beta2 v + (1 - beta2) g^2      (amsgrad: u = max(u, v), else u = v)
//   w = w - step_size m / (sqrt(u) / bias2_sqrt + eps)
//
// where both sides of the fraction are multiplied by bias2_sqrt beforehand, which saves a division. Torch-free.
#pragma once

#include <cstdint>

#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

struct AdamCoefficients {
  float master_decay = 1.0F;
  float l2 = 0.0F;
  float beta2 = 0.999F;
  float gradient_share = 0.1F;  // 1 - beta1
  float square_share = 0.001F;  // 1 - beta2
  float step_size = 1e-3F;      // lr bias2_sqrt / (1 - beta1^t)
  float eps = 1e-8F;            // eps bias2_sqrt, bias2_sqrt = sqrt(1 - beta2^t)
  bool amsgrad = false;
};

// Elements `begin` to `end` - 1. States: m, v, and for amsgrad the maximum of v.
void adam_kernel(const AdamCoefficients& coefficients, const SliceArrays& arrays, int64_t begin, int64_t end);

}  // namespace ds::optimizers
