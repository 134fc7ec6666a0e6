// LayerNorm (arXiv:1607.06450) and RMSNorm (arXiv:1910.07467) of rows, with an addition before, forward and backward:
//
//   s = x + residual      y = (s - mean) rstd weight + bias      rstd = 1 / sqrt(mean((s - mean)^2) + eps)
//
// RMSNorm has no mean and no bias. Torch-free. Arrays are contiguous, [rows, size] of `type` or, where it is said, of
// the wide type (float_type.h).
#pragma once

#include <cstdint>

#include "ops/kernels/float_type.h"

namespace ds::ops {

struct NormForward {
  FloatType type = FloatType::kFloat32;
  int64_t size = 0;
  double eps = 0.0;
  const void* input = nullptr;
  const void* residual = nullptr;  // or null: s is input
  void* sum = nullptr;             // s, rounded to `type` before it is used; null without a residual
  const void* weight = nullptr;    // wide [size]; or null: ones
  const void* bias = nullptr;      // wide [size]; or null: zeros
  void* output = nullptr;
  void* mean = nullptr;  // wide [rows]; null: RMSNorm
  void* rstd = nullptr;  // wide [rows]
};

// Rows `begin` to `end` - 1.
void norm_forward(const NormForward& norm, int64_t begin, int64_t end);

struct NormBackward {
  FloatType type = FloatType::kFloat32;
  int64_t size = 0;
  const void* output_gradient = nullptr;
  const void* sum_gradient = nullptr;  // of s from elsewhere; or null
  const void* input = nullptr;         // s
  const void* weight = nullptr;        // wide [size]; or null
  const void* mean = nullptr;          // wide [rows]; null: RMSNorm
  const void* rstd = nullptr;          // wide [rows]
  void* input_gradient = nullptr;      // of s, which is that of x and of the residual
  void* weight_gradient = nullptr;     // wide [size], added to; or null
  void* bias_gradient = nullptr;       // wide [size], added to; or null
};

void norm_backward(const NormBackward& norm, int64_t begin, int64_t end);

}  // namespace ds::ops
