#include "tests/parity/expect_curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <vector>

#include "tests/support/grid.h"

namespace ds::test {
namespace {

struct Tolerances {
  double loss;
  double mean_loss;
  double norm;  // relative
};

constexpr Tolerances kFloat32 = {.loss = 5e-6, .mean_loss = 5e-6, .norm = 2e-5};
constexpr Tolerances kHalf = {.loss = 1.5e-2, .mean_loss = 2e-3, .norm = 4e-2};

void compare(const std::vector<nlohmann::json>& steps, const CurveValues& wanted, const Tolerances& tolerances) {
  double worst_loss = 0;
  double loss_sum = 0;
  double worst_norm = 0;
  for (size_t step = 0; step < steps.size(); ++step) {
    ASSERT_FALSE(steps[step]["skipped"].get<bool>());
    const double norm = wanted.grad_norm[step];
    const double loss_difference = std::abs(steps[step]["loss"].get<double>() - wanted.loss[step]);
    worst_loss = std::max(worst_loss, loss_difference);
    loss_sum += loss_difference;
    worst_norm = std::max(worst_norm, std::abs(steps[step]["grad_norm"].get<double>() - norm) / norm);
  }
  EXPECT_LE(worst_loss, tolerances.loss);
  EXPECT_LE(loss_sum / static_cast<double>(steps.size()), tolerances.mean_loss);
  EXPECT_LE(worst_norm, tolerances.norm);
}

}  // namespace

int compared_steps() { return whole_grid_wanted() ? 50 : 12; }

GptResult expect_curve(const GptJob& job, const Curve& curve) {
  std::future<const CurveValues&> wanted =
      std::async(std::launch::async, torch_curve, curve, static_cast<size_t>(job.steps));
  GptResult run = run_gpt(job);
  compare(run.steps, wanted.get(), curve.precision == "fp32" ? kFloat32 : kHalf);
  return run;
}

}  // namespace ds::test
