#include "layers/fp8/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "core/check.h"
#include "layers/fp8/quantize_on_device.h"

namespace ds::fp8 {
namespace {

constexpr double kLargestE4M3 = 448.0;
constexpr double kLargestE5M2 = 57344.0;

// values [..], scale broadcast over them.
at::Tensor cast_scaled(const at::Tensor& values, at::ScalarType format, const at::Tensor& scale) {
  const double largest = largest_of(format);
  const at::Tensor wide = values.to(at::kFloat);
  const at::Tensor scaled = wide.is_same(values) ? wide * scale : at::Tensor(wide).mul_(scale);  // one copy, not two
  return at::Tensor(scaled).clamp_(-largest, largest).to(format);
}

// 1 / scale, and NaN where the values were not finite.
at::Tensor inverse_of(const at::Tensor& scale, const at::Tensor& amax) {
  return scale.reciprocal() + (amax - amax);  // NOLINT(misc-redundant-expression): NaN where amax is not finite
}

// [rows / a, a, columns / b, b] with one scale for each [a, b].
Quantized quantize_parts(const at::Tensor& values, at::ScalarType format, int64_t margin, int64_t rows_of_block) {
  const int64_t rows = values.size(0);
  const int64_t columns = values.size(1);
  ensure(rows % rows_of_block == 0 && columns % kBlock == 0, "blocks divide the matrix");
  if (quantize_kernels_take(values)) return parts_on_device(values, format, margin, rows_of_block);
  const at::Tensor parts = values.view({rows / rows_of_block, rows_of_block, columns / kBlock, kBlock});
  const at::Tensor amax = values.numel() == 0
                              ? at::zeros({rows / rows_of_block, columns / kBlock}, values.options().dtype(at::kFloat))
                              : parts.abs().amax({1, 3}).to(at::kFloat);
  const at::Tensor scale = scale_for(amax, format, margin);
  const at::Tensor cast = cast_scaled(parts, format, scale.unsqueeze(1).unsqueeze(3));
  return {cast.view({rows, columns}), inverse_of(scale, amax)};
}

}  // namespace

double largest_of(at::ScalarType format) {
  ensure(format == kE4M3 || format == kE5M2, "an FP8 format is E4M3 or E5M2");
  return format == kE4M3 ? kLargestE4M3 : kLargestE5M2;
}

at::Tensor amax_of(const at::Tensor& values) {
  if (values.numel() == 0) return at::zeros({}, values.options().dtype(at::kFloat));
  const auto [smallest, largest] = at::aminmax(values);  // one pass, without a copy of magnitudes
  return at::maximum(largest.abs(), smallest.abs()).to(at::kFloat);
}

at::Tensor scale_for(const at::Tensor& amax, at::ScalarType format, int64_t margin) {
  // As Transformer Engine has it: the quotient of two numbers, rounded once.
  const at::Tensor rounded = at::full_like(amax, largest_of(format)).div_(amax);
  const at::Tensor scale = rounded.mul_(std::ldexp(1.0, -static_cast<int>(margin)));
  const at::Tensor limited = scale.clamp_max(std::numeric_limits<float>::max());
  const at::Tensor usable = amax.gt(0).logical_and_(amax.isfinite());
  return at::where(usable, limited, at::ones_like(amax));
}

Quantized quantize(const at::Tensor& values, at::ScalarType format, const at::Tensor& scale, const at::Tensor& amax) {
  return {cast_scaled(values, format, scale).contiguous(), inverse_of(scale, amax)};
}

Quantized quantize_rows(const at::Tensor& values, at::ScalarType format, int64_t margin) {
  return quantize_parts(values.contiguous(), format, margin, 1);
}

Quantized quantize_blocks(const at::Tensor& values, at::ScalarType format, int64_t margin) {
  return quantize_parts(values.contiguous(), format, margin, kBlock);
}

Quantized transposed(const Quantized& matrix) {
  ensure(!matrix.has_blocks() || matrix.inverse.size(0) * kBlock == matrix.values.size(0),
         "scales of rows are not those of columns");
  return {has_quantize_kernels(matrix.values.device()) ? transposed_on_device(matrix.values)
                                                       : matrix.values.t().contiguous(),
          matrix.has_blocks() ? matrix.inverse.t().contiguous() : matrix.inverse};
}

at::Tensor dequantized(const Quantized& matrix) {
  const at::Tensor values = matrix.values.to(at::kFloat);
  if (!matrix.has_blocks()) return values * matrix.inverse;
  const int64_t rows = values.size(0);
  const int64_t rows_of_block = rows == 0 ? 1 : rows / matrix.inverse.size(0);
  const at::Tensor parts = values.view({rows / rows_of_block, rows_of_block, values.size(1) / kBlock, kBlock});
  return (parts * matrix.inverse.unsqueeze(1).unsqueeze(3)).view({rows, values.size(1)});
}

}  // namespace ds::fp8
