// Plain LibTorch here against Python's torch there (reference.json): what jobs of gpt are compared with is right
// itself.
#include "tests/parity/torch_curve.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <stdexcept>
#include <vector>

#include "tests/support/grid.h"

namespace ds::test {
namespace {

struct Bounds {
  double loss;
  double norm;  // relative
};

// From step five on, the rounding of another CPU's kernels grows: between AVX-512, AVX2 and neither to 1.6e-5
// and 1.1e-4, in 16 bits to 1.2e-2 and 2.1e-2.
constexpr size_t kFirstSteps = 4;
constexpr Bounds kFirst = {5e-6, 2e-5};
constexpr Bounds kAll = {5e-5, 5e-4};
constexpr Bounds kHalfFirst = {5e-3, 1e-2};
constexpr Bounds kHalfAll = {3e-2, 1e-1};

struct Case {
  Curve curve;
  size_t steps;
  size_t sampled_steps = 6;
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.curve.name(); }  // NOLINT: GoogleTest's name

class TorchCurve : public testing::TestWithParam<Case> {};

TEST_P(TorchCurve, IsThatOfPython) {
  static const nlohmann::json reference =
      nlohmann::json::parse(std::ifstream(DS_SOURCE_DIR "/tests/parity/reference.json"));
  const Curve& curve = GetParam().curve;
  const size_t steps = whole_grid_wanted() ? GetParam().steps : GetParam().sampled_steps;
  const nlohmann::json& wanted = reference["curves"][curve.name()];
  const CurveValues& found = torch_curve(curve, steps);
  const bool half = curve.precision != "fp32";
  for (size_t step = 0; step < steps; ++step) {
    const Bounds early = half ? kHalfFirst : kFirst;
    const Bounds bounds = step < kFirstSteps ? early : (half ? kHalfAll : kAll);
    const double norm = wanted["grad_norm"].at(step);
    EXPECT_NEAR(found.loss[step], wanted["loss"].at(step).get<double>(), bounds.loss) << "step " << step + 1;
    EXPECT_NEAR(found.grad_norm[step], norm, bounds.norm * norm) << "step " << step + 1;
  }
}

// All that jobs are compared with. The whole grid runs as many steps of each as a job does; a sample runs so many of
// one plain and one tied curve, and six of the others: what differs from Python differs from the first steps on.
const Case kCases[] = {
    {{.global_batch = 1}, 50},
    {{.global_batch = 2}, 50, 50},
    {{.global_batch = 3}, 50},
    {{.global_batch = 4}, 50},
    {{.global_batch = 6}, 12},
    {{.global_batch = 8}, 12},
    {{.global_batch = 16}, 12},
    {{.global_batch = 2, .tied = true}, 50, 50},
    {{.global_batch = 4, .tied = true}, 50},
    {{.global_batch = 4, .frozen = true}, 50},
    {{.global_batch = 4, .tied = true, .frozen = true}, 50},
    {{.global_batch = 2, .precision = "bf16"}, 12},
    {{.global_batch = 4, .precision = "bf16"}, 12},
    {{.global_batch = 2, .precision = "fp16"}, 12},
};

INSTANTIATE_TEST_SUITE_P(Curves, TorchCurve, testing::ValuesIn(kCases),
                         [](const auto& variant) { return variant.param.curve.name(); });

TEST(PlainCurve, GoesOnWhereItStopped) {
  const Curve curve{.global_batch = 1, .tied = true};
  const CurveValues first = torch_curve(curve, 2);
  ASSERT_EQ(first.loss.size(), 2U);
  const CurveValues& longer = torch_curve(curve, 3);
  EXPECT_EQ(longer.loss.size(), 3U);
  EXPECT_EQ(std::vector(longer.loss.begin(), longer.loss.begin() + 2), first.loss);
  EXPECT_LT(longer.loss[2], first.loss[1]);
}

TEST(PlainCurve, AnUnknownPrecisionIsRefused) {
  EXPECT_THROW(torch_curve({.precision = "fp8"}, 1), std::runtime_error);
}

}  // namespace
}  // namespace ds::test
