// Levels, masks and schedules against loops over plain numbers.
#include "layers/compressed/quantizers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "core/check.h"
#include "layers/compressed/methods.h"

namespace ds::model_compression {
namespace {

std::vector<double> numbers(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kDouble).contiguous().view(-1);
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

at::Tensor sample(at::ScalarType type = at::kDouble) {
  return (torch::sin(torch::arange(48, at::kDouble) * 0.73) * torch::arange(1, 49, at::kDouble) * 0.1)
      .view({6, 8})
      .to(type);
}

// One group, as the formulas say.
std::vector<double> plain(std::vector<double> x, int64_t bits, bool symmetric, const std::vector<double>& noise) {
  const double least = *std::min_element(x.begin(), x.end());
  const double largest = *std::max_element(x.begin(), x.end());
  double size = 0;
  for (const double v : x) size += std::abs(v) / static_cast<double>(x.size());
  double above = 0;
  double count = 0;
  for (const double v : x) {
    if (std::abs(v) > 0.7 * size) above += std::abs(v), count += 1;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    const double p = noise.empty() ? 0 : noise[i];
    if (bits == 1) {
      x[i] = v > 0 ? size : v < 0 ? -size : 0;
    } else if (bits == 2) {
      x[i] = v > 0.7 * size ? above / count : v < -0.7 * size ? -above / count : 0;
    } else if (symmetric) {
      const double levels = std::pow(2.0, static_cast<double>(bits));
      const double scale = 2 * std::max(std::abs(least), std::abs(largest)) / levels;
      x[i] = std::clamp(std::nearbyint(v / scale + p), -levels / 2, levels / 2 - 1) * scale;
    } else {
      const double levels = std::pow(2.0, static_cast<double>(bits));
      const double scale = (largest - least) / levels;
      const double zero = std::nearbyint(least / scale) * scale;
      x[i] = std::clamp(std::nearbyint((v - zero) / scale + p), 0.0, levels - 1) * scale + zero;
    }
  }
  return x;
}

TEST(Quantizers, HaveTheLevelsOfTheFormulas) {
  const at::Tensor x = sample();
  const at::Tensor noise = torch::cos(torch::arange(48, at::kDouble) * 2.1).view({6, 8}) * 0.5;
  for (const int64_t bits : {1, 2, 3, 4, 8}) {
    for (const bool symmetric : {true, false}) {
      if (bits < 3 && !symmetric) continue;
      for (const int64_t groups : {1, 2, 6, 24}) {
        for (const bool with_noise : {false, true}) {
          if (with_noise && bits < 3) continue;
          const std::vector<double> given = numbers(x);
          const std::vector<double> draws = numbers(noise);
          const auto size = static_cast<int64_t>(given.size()) / groups;
          std::vector<double> expected;
          for (int64_t g = 0; g < groups; ++g) {
            const auto part =
                plain({given.begin() + g * size, given.begin() + (g + 1) * size}, bits, symmetric,
                      with_noise ? std::vector<double>(draws.begin() + g * size, draws.begin() + (g + 1) * size)
                                 : std::vector<double>{});
            expected.insert(expected.end(), part.begin(), part.end());
          }
          const auto found = numbers(quantized(
              x, {.bits = bits, .symmetric = symmetric, .groups = groups, .noise = with_noise ? noise : at::Tensor()}));
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_NEAR(found[i], expected[i], 1e-12) << bits << " bits, element " << i << ", groups " << groups;
          }
        }
      }
    }
  }
}

// Values that deepspeed_reference.py has recorded of DeepSpeed 0.19.6's classes.
TEST(Quantizers, AgreeWithDeepSpeed) {
  std::ifstream file(std::string(DS_SOURCE_DIR) + "/tests/layers/compressed/deepspeed_reference.txt");
  const at::Tensor x = sample();
  int lines = 0;
  for (std::string line; std::getline(file, line); ++lines) {
    std::istringstream words(line);
    std::string what;
    Levels levels;
    double ratio = 0;
    words >> what >> levels.bits >> levels.groups >> ratio;
    levels.symmetric = what == "symmetric";
    const auto found = numbers(what == "mask" ? largest_mask(x, ratio).to(at::kDouble) : quantized(x, levels));
    for (const double value : found) {
      double expected = 0;
      ASSERT_TRUE(words >> expected);
      EXPECT_NEAR(value, expected, 1e-12) << line.substr(0, 40);
    }
  }
  EXPECT_EQ(lines, 27);
}

TEST(Quantizers, LeaveGroupsWithoutAScaleAsTheyAre) {
  const at::Tensor zeros = torch::zeros({2, 4});
  for (const int64_t bits : {1, 2, 4, 8}) {
    EXPECT_TRUE(torch::equal(quantized(zeros, {.bits = bits, .groups = 2}), zeros)) << bits;
  }
  const at::Tensor same = torch::full({2, 4}, 3.25);
  EXPECT_TRUE(torch::equal(quantized(same, {.bits = 4, .symmetric = false, .groups = 2}), same));
}

TEST(Quantizers, RefuseGroupsThatDoNotDivide) { EXPECT_THROW(quantized(sample(), {.groups = 5}), UsageError); }

TEST(Quantizers, Compute16BitsInFloat32) {
  const at::Tensor x = sample(at::kBFloat16);
  const at::Tensor expected = quantized(x.to(at::kFloat), {.bits = 4, .groups = 2}).to(at::kBFloat16);
  EXPECT_TRUE(torch::equal(quantized(x, {.bits = 4, .groups = 2}), expected));
}

TEST(Quantizers, TakeAStaticRange) {
  const at::Tensor x = torch::tensor({-3.0, -0.3, 0.1, 0.9, 2.0});
  const at::Tensor range = torch::tensor({-1.0, 0.5});
  // s = 2/16; s = 1.5/16 and z = round(-1/s) s.
  const auto found = numbers(quantized_in_range(x, range, 4, true));
  const std::vector<double> expected = {-1.0, -0.25, 0.125, 0.875, 0.875};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-7);
  const double scale = 1.5 / 16;
  const double zero = std::nearbyint(-1.0 / scale) * scale;
  const auto other = numbers(quantized_in_range(x, range, 4, false));
  const auto given = numbers(x);
  for (size_t i = 0; i < given.size(); ++i) {
    EXPECT_NEAR(other[i], std::clamp(std::nearbyint((given[i] - zero) / scale), 0.0, 15.0) * scale + zero, 1e-6);
  }
}

TEST(Masks, KeepTheLargestAndOfEqualOnesTheFirst) {
  const at::Tensor scores = torch::tensor({0.5, 2.0, 0.5, -1.0, 0.5});
  const auto kept = [&](double ratio) { return numbers(largest_mask(scores, ratio).to(at::kDouble)); };
  EXPECT_EQ(kept(0.2), (std::vector<double>{0, 1, 0, 0, 0}));
  EXPECT_EQ(kept(0.21), (std::vector<double>{1, 1, 0, 0, 0}));  // ceil(1.05)
  EXPECT_EQ(kept(0.6), (std::vector<double>{1, 1, 1, 0, 0}));
  EXPECT_EQ(kept(1.0), (std::vector<double>{1, 1, 1, 1, 1}));
}

TEST(StraightThrough, GivesTheValuesAndPassesTheGradient) {
  const at::Tensor x = sample().requires_grad_(true);
  const at::Tensor values = quantized(x, {.bits = 3});
  const at::Tensor y = straight_through(x, values);
  EXPECT_TRUE(torch::equal(y, values));
  const at::Tensor factor = torch::arange(48, at::kDouble).view({6, 8});
  (y * factor).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), factor));
}

TEST(BitSchedule, FallsAfterAPeriodThatDoubles) {
  const BitSchedule schedule{.start = 8, .target = 4, .period = 3};
  std::vector<int64_t> bits;
  for (int64_t step = 0; step < 30; ++step) bits.push_back(bits_at(schedule, step));
  // The quantisations, counted from 1, of which one bit less is used: 3, 6, 12, 24.
  for (int64_t q = 1; q <= 30; ++q) {
    const int64_t expected = q < 3 ? 8 : q < 6 ? 7 : q < 12 ? 6 : q < 24 ? 5 : 4;
    EXPECT_EQ(bits[static_cast<size_t>(q - 1)], expected) << q;
  }
  const BitSchedule at_once{.start = 8, .target = 5, .period = 0};
  EXPECT_EQ(bits_at(at_once, 0), 7);
  EXPECT_EQ(bits_at(at_once, 1), 6);
  EXPECT_EQ(bits_at(at_once, 9), 5);
}

TEST(BitSchedule, MixesLessOfTheWeightSinceTheLastChange) {
  const BitSchedule schedule{.start = 8, .target = 7, .period = 4, .mixed_ratio = 0.25};
  const std::vector<double> expected = {0.75, 0.5, 0.25, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0};
  for (size_t step = 0; step < expected.size(); ++step) {
    EXPECT_DOUBLE_EQ(float_share_at(schedule, static_cast<int64_t>(step)), expected[step]) << step;
  }
}

}  // namespace
}  // namespace ds::model_compression
