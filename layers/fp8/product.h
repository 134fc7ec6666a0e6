// Products of FP8 matrices: on hardware that has them, or with the same numbers in float32.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/fp8/quantize.h"

namespace ds::fp8 {

enum class Arithmetic {
  kHardware,  // at::_scaled_mm
  kEmulated,  // products of the same FP8 numbers, added up in float32: for tests, on any device
};

struct ProductOptions {
  at::ScalarType type = at::kFloat;  // of the result: bfloat16, float16 or float32
  Arithmetic arithmetic = Arithmetic::kHardware;
  bool fast_accumulation = false;  // hardware adds with fewer bits; ignored with blocks
};

// a [m, k] times b [n, k] transposed, plus `bias` [n] (undefined: none), which is added before the result is rounded:
// [m, n]. Scales of a: one, or of rows; of b: one, or of blocks of 128 x 128, as a has.
at::Tensor product(const Quantized& a, const Quantized& b, const at::Tensor& bias, const ProductOptions& options);

// a [k, m] transposed times b [k, n]: [m, n]. One scale each.
at::Tensor product_over_rows(const Quantized& a, const Quantized& b, const ProductOptions& options);

}  // namespace ds::fp8
