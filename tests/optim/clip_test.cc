#include "optim/clip.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ds::optimizers {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfiniteNorm = std::numeric_limits<double>::infinity();

double on_device(double norm, std::initializer_list<double> max_norms) {
  return clip_factor(at::full({1}, norm, at::kDouble), max_norms).item<double>();
}

at::Tensor with_gradient(double value) {
  at::Tensor parameter = at::ones({4}).requires_grad_();
  parameter.mutable_grad() = at::full({4}, value);
  return parameter;
}

TEST(Clip, FactorsOfAnEngineApplyOneAfterTheOther) {
  EXPECT_EQ(clip_factor(0.5, {1.0}), 1.0);
  EXPECT_EQ(clip_factor(4.0, {1.0}), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(clip_factor(4.0, {0.0, 0.0}), 1.0);
  EXPECT_NEAR(clip_factor(4.0, {2.0, 1.0}), 0.25, 1e-6);
  EXPECT_FLOAT_EQ(static_cast<float>(on_device(4.0, {2.0, 1.0})), static_cast<float>(clip_factor(4.0, {2.0, 1.0})));
  EXPECT_FALSE(clip_factor(at::full({1}, 4.0, at::kDouble), {0.0}).defined());
}

TEST(Clip, NormsThatAreNotFiniteInAnEngine) {
  EXPECT_EQ(clip_factor(kNaN, {1.0}), 1.0);
  EXPECT_EQ(on_device(kNaN, {1.0}), 1.0);
  EXPECT_EQ(clip_factor(kInfiniteNorm, {1.0}), 0.0);
  EXPECT_EQ(on_device(kInfiniteNorm, {1.0}), 0.0);
}

TEST(Clip, ScalesGradientsAsTorchDoes) {
  const at::Tensor without = at::ones({4}).requires_grad_();
  const at::Tensor large = with_gradient(2.0);  // of norm 4
  clip_to_norm({without, large}, 4.0, 1.0);
  EXPECT_FALSE(without.grad().defined());
  EXPECT_NEAR(large.grad().norm().item<double>(), 1.0, 1e-5);
  const at::Tensor small = with_gradient(0.25);
  clip_to_norm({small}, 0.5, 1.0);
  EXPECT_TRUE(small.grad().eq(0.25).all().item<bool>());
  const at::Tensor bad = with_gradient(1.0);
  clip_to_norm({bad}, kNaN, 1.0);
  EXPECT_TRUE(bad.grad().isnan().all().item<bool>());
}

}  // namespace
}  // namespace ds::optimizers
