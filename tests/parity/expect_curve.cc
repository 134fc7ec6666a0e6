#include "tests/parity/expect_curve.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <future>

namespace ds::test {
namespace {

void compare(const std::vector<nlohmann::json>& steps, const CurveValues& wanted, double loss_tolerance,
             double norm_tolerance) {
  double worst_loss = 0;
  double worst_norm = 0;
  for (size_t step = 0; step < steps.size(); ++step) {
    const double loss = wanted.loss[step];
    const double norm = wanted.grad_norm[step];
    ASSERT_FALSE(steps[step]["skipped"].get<bool>());
    worst_loss = std::max(worst_loss, std::abs(steps[step]["loss"].get<double>() - loss));
    worst_norm = std::max(worst_norm, std::abs(steps[step]["grad_norm"].get<double>() - norm) / norm);
  }
  EXPECT_LE(worst_loss, loss_tolerance);
  EXPECT_LE(worst_norm, norm_tolerance);
}

}  // namespace

GptResult expect_curve(const GptJob& job, const Curve& curve, double loss_tolerance, double norm_tolerance) {
  std::future<const CurveValues&> wanted =
      std::async(std::launch::async, torch_curve, curve, static_cast<size_t>(job.steps));
  GptResult run = run_gpt(job);
  compare(run.steps, wanted.get(), loss_tolerance, norm_tolerance);
  return run;
}

}  // namespace ds::test
