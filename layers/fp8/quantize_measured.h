// A tensor in FP8 with one scale, stored or its own, and its largest magnitude.
//
// CUDA tensors of float32, bfloat16 and float16, and their parts (quantize.h), go through the kernels of
// libdsengine_cuda where it is loaded, with the bits of LibTorch's operators, which have all others. Any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "layers/fp8/quantize.h"

namespace ds::fp8 {

// Where a tensor's one scale comes from: it is `stored` where that is above 0, else scale_for() its amax.
struct ScaleChoice {
  at::Tensor stored;    // float32 []; undefined: none
  bool covers = false;  // `stored` only where it takes the largest of the values
  int64_t margin = 0;
  at::Tensor record;  // float32 []: becomes the amax where that is finite and larger; undefined: nothing does
};

// float32 []: the scale that `choice` gives a tensor of this amax.
at::Tensor chosen_scale(const ScaleChoice& choice, const at::Tensor& amax, at::ScalarType format);

struct Measured {
  Quantized matrix;
  at::Tensor amax;  // float32 [], as amax_of()
};

// One scale, and the amax of the values. On a device in one pass where the stored scale is taken, else in two.
Measured quantize_measured(const at::Tensor& values, at::ScalarType format, const ScaleChoice& choice);
Measured quantize_measured_by_operators(const at::Tensor& values, at::ScalarType format, const ScaleChoice& choice);

}  // namespace ds::fp8
