// Inputs and comparisons that the tests of SignCodec on the CPU and on a GPU share.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "compression/sign_codec.h"

namespace ds::compression {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kDenormal = 3e-42F;

struct Layout {
  std::vector<ScaleRange> ranges;
  int64_t numel = 0;
};

// No range; one; one that ends before the tensor does; gaps before, between and after; ranges side by side; many small
// ones, some of them empty.
inline std::vector<Layout> layouts_of(int64_t numel) {
  std::vector<Layout> layouts{{{}, numel}, {{{0, numel}}, numel}};
  if (numel > 3) layouts.push_back({{{0, numel - 3}}, numel});
  const int64_t third = numel / 24 * 8;
  if (third > 0) {
    layouts.push_back({{{third, third - 5}, {2 * third, numel - 2 * third - 1}}, numel});
    layouts.push_back({{{0, third}, {third, third}, {2 * third, numel - 2 * third}}, numel});
    Layout many{{}, numel};
    for (int64_t begin = 8; begin < numel; begin += 72) {
      many.ranges.push_back({begin, std::min(numel - begin, begin % 65)});
    }
    layouts.push_back(many);
  }
  return layouts;
}

// Ordinary values with zeros of both signs and denormal numbers among them; `extremes` adds what is not finite.
inline at::Tensor values_of(int64_t numel, bool extremes) {
  const at::Tensor values = torch::randn({numel});
  std::vector<float> special = {0.0F, -0.0F, kDenormal, -kDenormal, 3e38F, -3e38F};
  if (extremes) special.insert(special.end(), {kInf, -kInf, kNaN, -kNaN});
  auto* data = values.data_ptr<float>();
  for (int64_t i = 0; i < numel; i += 7) data[i] = special[static_cast<size_t>(i / 7) % special.size()];
  return values;
}

// What is not written would show.
inline at::Tensor unwritten(int64_t numel, at::ScalarType type, at::Device device = at::kCPU) {
  return torch::full({numel}, 0xA5, torch::dtype(type).device(device));
}

// Equal to the sign of a zero; one NaN is as another. `found` may be on any device, `expected` is on the CPU.
inline ::testing::AssertionResult same(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor here = found.cpu();
  if (at::equal(at::nan_to_num(here, 0, kInf, -kInf).view(at::kInt),
                at::nan_to_num(expected, 0, kInf, -kInf).view(at::kInt)) &&
      at::equal(here.isnan(), expected.isnan())) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "found " << here.slice(0, 0, 64) << "expected " << expected.slice(0, 0, 64);
}

// All passes over more elements than operators take at a time, by the device's kernels and by operators.
inline void expect_kernels_like_operators(at::Device device) {
  constexpr int64_t kNumel = (1 << 22) + (1 << 20) + 5;
  const SignCodec codec({{8, 1 << 20}, {(1 << 20) + 16, kNumel - (1 << 20) - 16}}, kNumel);
  const at::Tensor start = torch::randn({kNumel}).to(device);
  const at::Tensor scales = unwritten(2, at::kFloat, device);
  codec.scales(start, scales);
  const at::Tensor values = start.clone(), by_operators = start.clone();
  const at::Tensor bits = unwritten(codec.bytes(), at::kByte, device), bits_by_operators = bits.clone();
  codec.encode(values, scales, bits);
  codec.encode_by_operators(by_operators, scales, bits_by_operators);
  EXPECT_TRUE(at::equal(bits, bits_by_operators));
  EXPECT_TRUE(at::equal(values, by_operators));
  codec.add(bits, scales, values);
  codec.add_by_operators(bits, scales, by_operators);
  EXPECT_TRUE(at::equal(values, by_operators));
  EXPECT_TRUE(at::allclose(values, start, 0, 1e-6)) << "what the bits carry and what they leave is all of it";
  codec.decode(bits, scales, values);
  codec.decode_by_operators(bits, scales, by_operators);
  EXPECT_TRUE(at::equal(values, by_operators));
}

}  // namespace ds::compression
