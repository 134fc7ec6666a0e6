// FP8 as a table of its numbers, in float64: what a cast must find, said without one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "layers/fp8/quantize.h"

namespace ds::fp8 {

// All numbers of a format that are not negative, in ascending order: their place is their bit pattern.
inline std::vector<double> numbers_of(at::ScalarType format) {
  const bool e4m3 = format == kE4M3;
  const int mantissa = e4m3 ? 3 : 2;
  const int bias = e4m3 ? 7 : 15;
  std::vector<double> result;
  for (int bits = 0;; ++bits) {
    const int exponent = bits >> mantissa;
    const int fraction = bits & ((1 << mantissa) - 1);
    const double value = exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                                       : std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
    if (value > largest_of(format)) return result;
    result.push_back(value);
  }
}

// The nearest number; of two that are as near, the one with an even pattern. Beyond the largest: the largest.
inline double nearest_number(const std::vector<double>& numbers, double value) {
  const double magnitude = std::abs(value);
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), magnitude);
  double result = 0;
  if (above == numbers.end()) {
    result = numbers.back();
  } else if (above == numbers.begin()) {
    result = *above;
  } else {
    const double up = *above - magnitude;
    const double down = magnitude - *(above - 1);
    const bool above_is_even = (above - numbers.begin()) % 2 == 0;
    result = up < down || (up == down && above_is_even) ? *above : *(above - 1);
  }
  return std::copysign(result, value);
}

// float64: what each element stands for with this scale.
inline at::Tensor stated(const at::Tensor& values, at::ScalarType format, float scale) {
  const std::vector<double> numbers = numbers_of(format);
  at::Tensor result = values.to(at::kFloat).contiguous().to(at::kDouble).clone();
  double* const elements = result.data_ptr<double>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    // The product is rounded to float32, as everywhere.
    const float scaled = static_cast<float>(elements[i]) * scale;
    elements[i] = nearest_number(numbers, scaled) / static_cast<double>(scale);
  }
  return result;
}

// (largest / amax) / 2^margin, in float32.
inline float stated_scale(const at::Tensor& values, at::ScalarType format, int margin) {
  const auto amax = values.abs().max().to(at::kFloat).item<float>();
  return amax > 0 ? std::ldexp(static_cast<float>(largest_of(format)) / amax, -margin) : 1.0F;
}

}  // namespace ds::fp8
