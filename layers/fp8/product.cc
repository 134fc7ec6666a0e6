#include "layers/fp8/product.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "core/check.h"

namespace ds::fp8 {
namespace {

constexpr int64_t kRowsAligned = 16;  // sizes of cuBLAS' FP8 matrices are multiples of it

// Rows of zeros behind the matrix; their scales are 1.
Quantized with_rows_aligned(const Quantized& matrix) {
  const int64_t more = (kRowsAligned - matrix.values.size(0) % kRowsAligned) % kRowsAligned;
  if (more == 0) return matrix;
  // Bytes of zeros are zeros of both formats, and every device pads bytes.
  const at::Tensor bytes = at::constant_pad_nd(matrix.values.view(at::kByte), {0, 0, 0, more}, 0);
  return {bytes.view(matrix.values.scalar_type()),
          matrix.has_blocks() ? at::constant_pad_nd(matrix.inverse, {0, 0, 0, more}, 1) : matrix.inverse};
}

at::Tensor emulated(const Quantized& a, const Quantized& b, const at::Tensor& bias, at::ScalarType type) {
  at::Tensor sums;
  if (a.has_blocks()) {
    sums = at::mm(dequantized(a), dequantized(b).t());
  } else {
    // As hardware does: FP8 numbers are added up, and the sums are scaled.
    sums = at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t()).mul_(a.inverse * b.inverse);
  }
  if (bias.defined()) sums.add_(bias);
  return sums.to(type);
}

at::Tensor on_hardware(const Quantized& given, const Quantized& b, const at::Tensor& bias,
                       const ProductOptions& options) {
  const Quantized a = with_rows_aligned(given);
  const bool blocks = a.has_blocks();
  // The layouts that cuBLAS asks for: scales of rows lie column by column, those of 128 x 128 as their weight does.
  const at::Tensor a_scale = blocks ? a.inverse.t().contiguous().t() : a.inverse;
  const at::Tensor b_scale = blocks ? b.inverse.t() : b.inverse;
  const bool fused_bias = bias.defined() && options.type != at::kFloat;
  const at::Tensor result =
      at::_scaled_mm(a.values, b.values.t(), a_scale, b_scale, fused_bias ? std::optional(bias) : std::nullopt,
                     std::nullopt, options.type, options.fast_accumulation && !blocks);
  at::Tensor rows = result.narrow(0, 0, given.values.size(0));
  if (bias.defined() && !fused_bias) rows.add_(bias);
  return rows;
}

}  // namespace

at::Tensor product(const Quantized& a, const Quantized& b, const at::Tensor& bias, const ProductOptions& options) {
  ensure(a.has_blocks() == b.has_blocks() && a.values.size(1) == b.values.size(1), "factors fit one another");
  if (options.arithmetic == Arithmetic::kEmulated) return emulated(a, b, bias, options.type);
  if (a.values.size(0) == 0) {
    return at::zeros({0, b.values.size(0)}, a.values.options().dtype(options.type));
  }
  return on_hardware(a, b, bias, options);
}

at::Tensor product_over_rows(const Quantized& a, const Quantized& b, const ProductOptions& options) {
  ensure(!a.has_blocks() && !b.has_blocks(), "rows that are added up share a scale");
  if (options.arithmetic == Arithmetic::kEmulated) return product(transposed(a), transposed(b), {}, options);
  return product(transposed(with_rows_aligned(a)), transposed(with_rows_aligned(b)), {}, options);
}

}  // namespace ds::fp8
