// FP8 tensors against a table of the format's numbers, and against LibTorch's casts bit by bit.
#include "layers/fp8/quantize.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <limits>
#include <vector>

#include "layers/fp8/quantize_rules.h"
#include "tests/layers/fp8/fp8_numbers.h"

namespace ds::fp8 {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor values_of(int64_t rows, int64_t columns, at::ScalarType type = at::kFloat) {
  const at::Tensor steps = torch::arange(rows * columns, torch::kDouble);
  return (torch::sin(steps * 1.7) * torch::exp(torch::cos(steps * 0.3) * 5.0)).view({rows, columns}).to(type);
}

TEST(Fp8Numbers, AreThoseOfLibTorch) {
  for (const at::ScalarType format : {kE4M3, kE5M2}) {
    const std::vector<double> numbers = numbers_of(format);
    EXPECT_EQ(numbers.back(), largest_of(format));
    const at::Tensor bits = torch::arange(static_cast<int64_t>(numbers.size()), torch::kByte);
    const at::Tensor found = bits.view(format).to(at::kDouble);
    EXPECT_TRUE(torch::equal(found, torch::tensor(numbers, torch::kDouble)));
  }
}

TEST(Fp8Quantize, RoundsToTheNearestNumber) {
  for (const at::ScalarType format : {kE4M3, kE5M2}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor values = values_of(37, 48, type);
      const at::Tensor amax = amax_of(values);
      const at::Tensor scale = scale_for(amax, format, 1);
      EXPECT_EQ(scale.item<float>(), stated_scale(values, format, 1));
      const Quantized found = quantize(values, format, scale, amax);
      const at::Tensor numbers = found.values.to(at::kDouble) / scale.to(at::kDouble);
      EXPECT_TRUE(torch::equal(numbers, stated(values, format, scale.item<float>())));
      EXPECT_EQ(found.inverse.item<float>(), 1.0F / scale.item<float>());
    }
  }
}

TEST(Fp8Quantize, LeavesTheBitsOfLibTorchsCast) {
  for (const at::ScalarType format : {kE4M3, kE5M2}) {
    const at::Tensor values = values_of(64, 64);
    const at::Tensor amax = amax_of(values);
    const at::Tensor scale = scale_for(amax, format, 0);
    const at::Tensor expected = (values * scale).to(format);  // nothing is beyond the largest here
    EXPECT_TRUE(torch::equal(quantize(values, format, scale, amax).values.view(at::kByte), expected.view(at::kByte)));
  }
}

// The rule of the device's kernels, on the host: of each exponent and leading bits, with what lies just before a number
// in the middle of two, on it and behind it; and NaN.
TEST(Fp8Quantize, TheRuleOfKernelsLeavesTheBitsOfLibTorchsCast) {
  for (const at::ScalarType format : {kE4M3, kE5M2}) {
    std::vector<uint32_t> patterns;
    for (uint32_t high = 0; high < 1U << 16; ++high) {
      for (const uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0xFFFFU}) patterns.push_back(high << 16 | low);
    }
    const at::Tensor all = torch::empty({static_cast<int64_t>(patterns.size())});
    std::memcpy(all.data_ptr(), patterns.data(), all.nbytes());
    const at::Tensor values = all.masked_select(all.abs().le(largest_of(format)).logical_or(all.isnan())).contiguous();
    ASSERT_GT(values.numel(), 100000);
    const at::Tensor expected = values.to(format).view(at::kByte);
    const at::Tensor found = torch::empty_like(expected);
    const float* from = values.const_data_ptr<float>();
    uint8_t* to = found.mutable_data_ptr<uint8_t>();
    for (int64_t i = 0; i < values.numel(); ++i) {
      to[i] = format == kE4M3 ? E4M3Bits::encode(from[i]) : E5M2Bits::encode(from[i]);
    }
    EXPECT_TRUE(torch::equal(found, expected));
  }
}

// Of a history a scale may be too large for what comes.
TEST(Fp8Quantize, LimitsWhatIsBeyondTheLargest) {
  const at::Tensor values = torch::tensor({1.0F, -3.0F, 1000.0F}).view({1, 3});
  const Quantized found = quantize(values, kE4M3, torch::tensor(300.0F), amax_of(values));
  EXPECT_TRUE(torch::equal(found.values.to(at::kFloat), torch::tensor({288.0F, -448.0F, 448.0F}).view({1, 3})));
}

TEST(Fp8Quantize, AMatrixThatIsNotFiniteMakesProductsNaN) {
  for (const double bad : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    at::Tensor values = values_of(2, 16);
    values[1][3] = bad;
    const at::Tensor amax = amax_of(values);
    EXPECT_TRUE(quantize(values, kE5M2, torch::tensor(2.0F), amax).inverse.isnan().item<bool>());
    EXPECT_EQ(scale_for(amax, kE5M2, 0).item<float>(), 1.0F);
  }
}

TEST(Fp8Quantize, ScalesOfZerosAndOfTinyNumbersAreFinite) {
  EXPECT_EQ(scale_for(torch::tensor(0.0F), kE4M3, 0).item<float>(), 1.0F);
  EXPECT_EQ(scale_for(torch::tensor(1e-40F), kE4M3, 0).item<float>(), std::numeric_limits<float>::max());
  EXPECT_EQ(amax_of(torch::zeros({0, 4})).item<float>(), 0.0F);
}

// Each 128 elements of a row, and each block, is what it would be as a tensor of its own.
TEST(Fp8Quantize, BlocksHaveScalesOfTheirOwn) {
  const at::Tensor values = values_of(256, 384, at::kBFloat16);
  const Quantized rows = quantize_rows(values, kE4M3, 0);
  ASSERT_EQ(rows.inverse.sizes(), (std::vector<int64_t>{256, 3}));
  const Quantized blocks = quantize_blocks(values, kE4M3, 1);
  ASSERT_EQ(blocks.inverse.sizes(), (std::vector<int64_t>{2, 3}));
  for (int64_t column = 0; column < 3; ++column) {
    for (const int64_t row : {0, 100, 255}) {
      const at::Tensor part = values[row].narrow(0, column * kBlock, kBlock);
      const at::Tensor found = dequantized(rows)[row].narrow(0, column * kBlock, kBlock);
      const at::Tensor expected = stated(part, kE4M3, stated_scale(part, kE4M3, 0));
      EXPECT_TRUE(torch::allclose(found.to(at::kDouble), expected, 1e-6, 0));
    }
    for (const int64_t row : {0, 1}) {
      const auto block_of = [&](const at::Tensor& whole) {
        return whole.narrow(0, row * kBlock, kBlock).narrow(1, column * kBlock, kBlock);
      };
      const at::Tensor part = block_of(values);
      const at::Tensor expected = stated(part, kE4M3, stated_scale(part, kE4M3, 1));
      EXPECT_TRUE(torch::allclose(block_of(dequantized(blocks)).to(at::kDouble), expected, 1e-6, 0));
    }
  }
  EXPECT_TRUE(torch::equal(dequantized(transposed(blocks)), dequantized(blocks).t()));
}

}  // namespace
}  // namespace ds::fp8
