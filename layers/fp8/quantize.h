// Tensors as 8-bit floating point with scales: E4M3 (largest 448) and E5M2 (57344).
//
// After Micikevicius et al., "FP8 formats for deep learning" (2022), and Transformer Engine's recipes: an element x is
// kept as the FP8 number nearest to x * scale, ties to even, limited to the format's largest, all in float32. No graph
// is built. Any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ds::fp8 {

inline constexpr int64_t kBlock = 128;  // elements of a row, or rows and columns of a weight, that share a scale

inline constexpr at::ScalarType kE4M3 = at::kFloat8_e4m3fn;
inline constexpr at::ScalarType kE5M2 = at::kFloat8_e5m2;

// The largest finite number of a format.
double largest_of(at::ScalarType format);

// float32 []: the largest magnitude; 0 of no elements, NaN where one is NaN.
at::Tensor amax_of(const at::Tensor& values);

// float32, of amax's shape: (largest / amax) / 2^margin. 1 where amax is 0 or not finite; the largest float32 where the
// quotient is too large.
at::Tensor scale_for(const at::Tensor& amax, at::ScalarType format, int64_t margin);

// A matrix in FP8.
struct Quantized {
  at::Tensor values;   // [rows, columns] of the format, contiguous
  at::Tensor inverse;  // float32, 1 / scale: [], [rows, columns / 128] or [rows / 128, columns / 128], contiguous

  bool has_blocks() const { return inverse.dim() == 2; }
};

// One scale, float32 []. `amax`: that of the values. Where it is not finite the inverse is NaN, so that what the matrix
// is multiplied with shows it, as a product of the values would.
Quantized quantize(const at::Tensor& values, at::ScalarType format, const at::Tensor& scale, const at::Tensor& amax);

// A scale for each 128 elements of a row, or for each block of 128 x 128, from their own largest. Both sizes that are
// divided are multiples of 128.
Quantized quantize_rows(const at::Tensor& values, at::ScalarType format, int64_t margin);
Quantized quantize_blocks(const at::Tensor& values, at::ScalarType format, int64_t margin);

// Transposes a tensor of one scale, or of blocks of 128 x 128.
Quantized transposed(const Quantized& matrix);

// float32 [rows, columns]: the numbers that it stands for.
at::Tensor dequantized(const Quantized& matrix);

}  // namespace ds::fp8
