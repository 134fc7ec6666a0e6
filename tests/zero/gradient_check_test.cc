#include "zero/reduction/gradient_check.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace ds::zero {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// What accelerators do works on any device.
class GradientCheckTest : public ::testing::TestWithParam<bool> {};

TEST_P(GradientCheckTest, TheFirstBadGradientIsRemembered) {
  GradientCheck check(at::kCPU, /*lazy=*/GetParam());
  check.begin_pass(0);
  check.see(7, torch::full({70000}, kLargest));  // its square is beyond float32
  check.see(6, torch::full({3, 4}, 1.0, torch::kBFloat16));
  check.see(5, torch::zeros({0}));
  EXPECT_FALSE(check.first());
  check.begin_pass(3);
  check.see(7, torch::zeros({5}));
  at::Tensor bad = torch::zeros({4, 5});
  bad[3][4] = std::numeric_limits<float>::infinity();
  check.see(2, bad.t());
  check.see(1, bad * 0);
  ASSERT_TRUE(check.first());
  EXPECT_EQ(check.first()->parameter, 2);
  EXPECT_EQ(check.first()->micro_batch, 3);
  check.reset();
  EXPECT_FALSE(check.first());
  for (const auto type : {torch::kHalf, torch::kBFloat16, torch::kDouble}) {
    check.see(4, (bad * 0).to(type));
    EXPECT_EQ(check.first()->parameter, 4) << type;
    check.reset();
  }
}

INSTANTIATE_TEST_SUITE_P(Both, GradientCheckTest, ::testing::Bool(),
                         [](const auto& lazy) { return lazy.param ? "Lazy" : "AtOnce"; });

}  // namespace
}  // namespace ds::zero
