// Products of FP8 matrices against float64, and at::_scaled_mm, as hardware is given it, against the emulation.
#include "layers/fp8/product.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ds::fp8 {
namespace {

at::Tensor values_of(int64_t rows, int64_t columns, double step) {
  return torch::sin(torch::arange(rows * columns, torch::kDouble) * step).view({rows, columns}).to(at::kBFloat16);
}

Quantized with_one_scale(const at::Tensor& values, at::ScalarType format) {
  const at::Tensor amax = amax_of(values);
  return quantize(values, format, scale_for(amax, format, 0), amax);
}

at::Tensor exact(const Quantized& a, const Quantized& b) {
  return torch::mm(dequantized(a).to(at::kDouble), dequantized(b).to(at::kDouble).t());
}

TEST(Fp8Product, IsThatOfTheNumbersInFloat64) {
  const Quantized a = with_one_scale(values_of(24, 64, 0.7), kE5M2);
  const Quantized b = with_one_scale(values_of(32, 64, 1.1), kE4M3);
  const at::Tensor bias = values_of(1, 32, 0.3)[0];
  const at::Tensor expected = exact(a, b) + bias.to(at::kDouble);
  const at::Tensor wide = product(a, b, bias, {.type = at::kFloat, .arithmetic = Arithmetic::kEmulated});
  EXPECT_TRUE(torch::allclose(wide.to(at::kDouble), expected, 1e-5, 1e-5));
  const at::Tensor narrow = product(a, b, bias, {.type = at::kBFloat16, .arithmetic = Arithmetic::kEmulated});
  EXPECT_TRUE(torch::equal(narrow, wide.to(at::kBFloat16)));
}

TEST(Fp8Product, OfBlocksIsThatOfTheNumbersInFloat64) {
  const Quantized a = quantize_rows(values_of(5, 256, 0.7), kE5M2, 0);
  const Quantized b = quantize_blocks(values_of(384, 256, 1.1), kE4M3, 0);
  const at::Tensor found = product(a, b, {}, {.type = at::kFloat, .arithmetic = Arithmetic::kEmulated});
  EXPECT_TRUE(torch::allclose(found.to(at::kDouble), exact(a, b), 1e-5, 1e-5));
}

// LibTorch has the operator on the CPU too: what it is given is right in shapes, layouts and scales.
TEST(Fp8Product, OnHardwareIsTheEmulated) {
  for (const int64_t rows : {16, 24, 1}) {
    for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
      const Quantized a = with_one_scale(values_of(rows, 64, 0.7), kE4M3);
      const Quantized b = with_one_scale(values_of(32, 64, 1.1), kE4M3);
      const at::Tensor bias = values_of(1, 32, 0.3)[0].to(type);
      const at::Tensor expected = product(a, b, bias, {.type = type, .arithmetic = Arithmetic::kEmulated});
      const at::Tensor found = product(a, b, bias, {.type = type, .fast_accumulation = true});
      EXPECT_EQ(found.sizes(), expected.sizes());
      EXPECT_EQ(found.scalar_type(), type);
      EXPECT_TRUE(torch::allclose(found.to(at::kFloat), expected.to(at::kFloat), 1e-2, 1e-2)) << rows;
    }
  }
}

TEST(Fp8Product, OverRowsIsThatOfTheTransposed) {
  const Quantized a = with_one_scale(values_of(20, 48, 0.7), kE4M3);
  const Quantized b = with_one_scale(values_of(20, 32, 1.1), kE4M3);
  const at::Tensor expected = torch::mm(dequantized(a).to(at::kDouble).t(), dequantized(b).to(at::kDouble));
  for (const Arithmetic arithmetic : {Arithmetic::kEmulated, Arithmetic::kHardware}) {
    const at::Tensor found = product_over_rows(a, b, {.type = at::kFloat, .arithmetic = arithmetic});
    EXPECT_TRUE(torch::allclose(found.to(at::kDouble), expected, 1e-4, 1e-4));
  }
}

}  // namespace
}  // namespace ds::fp8
