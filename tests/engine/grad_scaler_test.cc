// GradScaler against the rules of torch.amp.GradScaler.
#include "dsengine/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "comm/slice_group.h"
#include "core/check.h"
#include "tests/model/client_run.h"
#include "tests/support/autocast_scope.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using test::run_ranks;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A parameter of ones whose next gradient is given.
struct One {
  at::Tensor parameter = torch::ones({3}, torch::requires_grad());
  torch::optim::SGD optimizer{{parameter}, torch::optim::SGDOptions(1.0)};

  void backward(GradScaler& scaler, float gradient) {
    optimizer.zero_grad();
    scaler.scale((parameter * gradient).sum()).backward();
  }
};

TEST(GradScaler, FollowsTorchsRuleStepByStep) {
  GradScaler scaler({.init_scale = 16, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  One one;
  // Scale of each step, and whether it is finite: torch.amp.GradScaler(init_scale=16, growth_factor=4, ...).
  const std::vector<std::pair<double, bool>> steps = {{16, true},  {16, true}, {16, true}, {64, true}, {64, true},
                                                      {64, false}, {16, true}, {16, true}, {16, true}, {64, false},
                                                      {16, false}, {4, true},  {4, true},  {4, true},  {16, true}};
  double weight = 1.0;
  for (const auto& [scale, finite] : steps) {
    EXPECT_EQ(scaler.get_scale(), scale);
    one.backward(scaler, finite ? 0.125F : kInfinity);
    EXPECT_EQ(scaler.step(one.optimizer), finite);
    scaler.update();
    if (finite) weight -= 0.125;
    EXPECT_TRUE(one.parameter.detach().equal(torch::full({3}, weight)));
  }
}

// torch keeps the scale a finite float32.
TEST(GradScaler, DoesNotGrowBeyondFloat32) {
  GradScaler scaler({.init_scale = std::ldexp(1.0, 127), .growth_interval = 1});
  One one;
  one.backward(scaler, 0.0F);
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), std::ldexp(1.0, 127));
}

TEST(GradScaler, UnscalesInPlaceForClipping) {
  GradScaler scaler({.init_scale = 1024});
  One one;
  one.backward(scaler, 0.5F);
  EXPECT_TRUE(one.parameter.grad().equal(torch::full({3}, 512.0F)));
  scaler.unscale_(one.optimizer);
  EXPECT_TRUE(one.parameter.grad().equal(torch::full({3}, 0.5F)));
  torch::nn::utils::clip_grad_value_({one.parameter}, 0.25);
  EXPECT_TRUE(scaler.step(one.optimizer));
  EXPECT_TRUE(one.parameter.detach().equal(torch::full({3}, 0.75F)));
}

TEST(GradScaler, WhatIsNotANumberInOneOptimizerLeavesTheOtherAlone) {
  GradScaler scaler({.init_scale = 8});
  One good, bad;
  good.backward(scaler, 1.0F);
  bad.backward(scaler, std::nanf(""));
  EXPECT_TRUE(scaler.step(good.optimizer));
  EXPECT_FALSE(scaler.step(bad.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);  // of all of them
}

TEST(GradScaler, MisuseIsNamedAsTorchDoes) {
  const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
  GradScaler scaler;
  One one;
  EXPECT_THAT([&] { scaler.update(); }, says("_scale is None"));
  EXPECT_THAT([&] { scaler.unscale_(one.optimizer); }, says("_scale is None"));
  one.backward(scaler, 1.0F);
  EXPECT_THAT([&] { scaler.update(); }, says("No inf checks were recorded prior to update."));
  scaler.unscale_(one.optimizer);
  EXPECT_THAT([&] { scaler.unscale_(one.optimizer); },
              says("unscale_() has already been called on this optimizer since the last update()."));
  scaler.step(one.optimizer);
  EXPECT_THAT([&] { scaler.unscale_(one.optimizer); }, says("unscale_() is being called after step()."));
  EXPECT_THAT([&] { scaler.step(one.optimizer); }, says("step() has already been called since the last update()."));
  scaler.update();
  one.optimizer.zero_grad();
  EXPECT_THAT([&] { scaler.step(one.optimizer); }, says("No inf checks were recorded for this optimizer."));
  scaler.update(32.0);
  EXPECT_EQ(scaler.get_scale(), 32);
  const at::Tensor half = torch::ones({2}, torch::kHalf);
  half.mutable_grad() = torch::ones({2}, torch::kHalf);
  torch::optim::SGD halves({half}, 0.1);
  EXPECT_THAT([&] { scaler.unscale_(halves); }, says("Attempting to unscale FP16 gradients."));
  EXPECT_THAT([&] { scaler.load_state_dict({}); }, says("The source state dict is empty"));
  EXPECT_THAT([] { GradScaler bad({.init_scale = 0.0}); }, ThrowsMessage<ConfigError>(HasSubstr("init_scale")));
  EXPECT_THAT([] { GradScaler bad({.growth_interval = 0}); }, ThrowsMessage<ConfigError>(HasSubstr("growth interval")));
  EXPECT_THAT([] { GradScaler bad({.growth_factor = 1.0}); }, ThrowsMessage<ConfigError>(HasSubstr("growth factor")));
  EXPECT_THAT([] { GradScaler bad({.backoff_factor = 1.0}); }, ThrowsMessage<ConfigError>(HasSubstr("backoff factor")));
}

TEST(GradScaler, ThatIsOffDoesNothing) {
  GradScaler scaler({.init_scale = 0, .growth_interval = 0, .enabled = false});
  One one;
  one.backward(scaler, kInfinity);
  scaler.unscale_(one.optimizer);
  EXPECT_TRUE(scaler.step(one.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1);
  EXPECT_TRUE(scaler.state_dict().empty());
  EXPECT_TRUE(std::isinf(one.parameter[0].item<float>()));
}

TEST(GradScaler, GoesOnFromAStateWithTorchsKeys) {
  GradScaler scaler({.init_scale = 16, .growth_interval = 3});
  One one;
  for (int step = 0; step < 2; ++step) {
    one.backward(scaler, 0.5F);
    scaler.step(one.optimizer);
    scaler.update();
  }
  const nlohmann::json state = scaler.state_dict();
  EXPECT_EQ(state, nlohmann::json::parse(R"({"scale": 16.0, "growth_factor": 2.0, "backoff_factor": 0.5,
                                             "growth_interval": 3, "_growth_tracker": 2})"));
  GradScaler other;
  other.load_state_dict(nlohmann::json::parse(state.dump()));
  EXPECT_EQ(other.state_dict(), state);
  one.backward(other, 0.5F);
  other.step(one.optimizer);
  other.update();
  EXPECT_EQ(other.get_scale(), 32);
}

TEST(GradScaler, WhatIsRefusedChangesNothing) {
  GradScaler scaler({.init_scale = 16, .growth_interval = 3});
  const nlohmann::json before = scaler.state_dict();
  nlohmann::json bad = before;
  bad["growth_factor"] = 4.0;
  bad["scale"] = -1.0;
  EXPECT_THAT([&] { scaler.load_state_dict(bad); }, ThrowsMessage<ConfigError>(HasSubstr("init_scale")));
  EXPECT_THROW(scaler.set_growth_factor(1.0), ConfigError);
  EXPECT_THROW(scaler.set_backoff_factor(2.0), ConfigError);
  EXPECT_EQ(scaler.state_dict(), before);
}

// Ranks with slices of one model: the gradient of one is infinite.
TEST(GradScaler, RanksLeaveOutAStepTogether) {
  for (const bool by_option : {true, false}) {
    run_ranks(3, [&](comm::Communicator& communicator) {
      One one;
      const auto group = borrowed(communicator);
      if (!by_option) comm::note_slice_group(one.parameter, group);
      GradScaler scaler({.init_scale = 64, .process_group = by_option ? group : nullptr});
      one.backward(scaler, communicator.rank() == 1 ? kInfinity : 0.5F);
      EXPECT_FALSE(scaler.step(one.optimizer));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32);
      one.backward(scaler, 0.5F);
      EXPECT_TRUE(scaler.step(one.optimizer));
      // A rank whose parameters have no gradient goes along.
      scaler.update();
      one.optimizer.zero_grad();
      if (communicator.rank() != 2) one.backward(scaler, communicator.rank() == 0 ? kInfinity : 0.5F);
      EXPECT_FALSE(scaler.step(one.optimizer));
    });
  }
}

// float16 autocast on one process: the same losses as without it, to what float16 keeps.
TEST(GradScaler, TrainsUnderFloat16Autocast) {
  const ClientRun run = {.world = 1, .steps = 50};
  const std::vector<double> expected = plain_losses(run, of_torch("AdamW"));
  SmallNet model;
  const auto optimizer = torch_optimizer("AdamW", model);
  GradScaler scaler({.init_scale = 1024});
  double largest = 0;
  for (int64_t step = 0; step < run.steps; ++step) {
    optimizer->zero_grad();
    at::Tensor loss;
    {
      const test::AutocastScope autocast(at::kHalf);
      loss = model->loss(sample(step, 0));
    }
    largest = std::max(largest, std::abs(loss.item<double>() - expected[static_cast<size_t>(step)]));
    scaler.scale(loss).backward();
    EXPECT_TRUE(scaler.step(*optimizer));
    scaler.update();
  }
  EXPECT_LT(largest, 2e-2);  // of losses between 1 and 6
}

}  // namespace
}  // namespace ds::engine
