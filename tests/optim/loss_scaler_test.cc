// The loss scaler against DeepSpeed's own (schedules_reference.json, made by schedules_reference.py).
#include "optim/loss_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace ds::optimizers {
namespace {

using nlohmann::json;
using Outcome = LossScaler::Outcome;

LossScalerOptions scaler_options_of(const json& o) {
  return {.initial_scale = o["init_scale"],
          .window = o["scale_window"],
          .hysteresis = o["delayed_shift"],
          .consecutive_hysteresis = o["consecutive_hysteresis"],
          .minimum_scale = o["min_scale"]};
}

TEST(LossScaler, FollowsDeepSpeedsScales) {
  std::ifstream file(DS_TEST_FOLDER "/schedules_reference.json");
  const json cases = json::parse(file).at("scalers");
  for (const json& test : cases) {
    SCOPED_TRACE(test["options"].dump());
    LossScaler scaler(scaler_options_of(test["options"]));
    const std::string overflows = test["overflows"];
    const size_t steps = test["after"].size();
    for (size_t i = 0; i < steps; ++i) {
      scaler.update(overflows[i] == '1');
      ASSERT_EQ(scaler.scale(), test["after"][i][0].get<double>()) << "after step " << i;
      ASSERT_EQ(scaler.state().remaining_hysteresis, test["after"][i][1].get<int64_t>()) << "after step " << i;
    }
    if (test["raised_at"].is_null()) continue;
    ASSERT_EQ(test["raised_at"].get<size_t>(), steps);
    const LossScalerState before = scaler.state();
    EXPECT_THROW(scaler.update(true), LossScaleError);
    EXPECT_EQ(scaler.state(), before);
  }
}

TEST(LossScaler, SaysWhatAnUpdateDid) {
  LossScaler scaler({.initial_scale = 4, .window = 2, .hysteresis = 2, .minimum_scale = 1});
  EXPECT_EQ(scaler.update(true), Outcome::kHysteresis);
  EXPECT_EQ(scaler.update(true), Outcome::kReduced);
  EXPECT_EQ(scaler.update(false), Outcome::kKept);
  EXPECT_EQ(scaler.update(false), Outcome::kKept);
  EXPECT_EQ(scaler.update(false), Outcome::kDoubled);
}

TEST(LossScaler, ExplainsTheMinimum) {
  LossScaler scaler({.initial_scale = 2, .hysteresis = 1, .minimum_scale = 1});
  scaler.update(true);
  try {
    scaler.update(true);
    FAIL() << "expected LossScaleError";
  } catch (const LossScaleError& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("step 2"), testing::HasSubstr("minimum of 1"),
                                             testing::HasSubstr("fp16.min_loss_scale")));
  }
}

// DeepSpeed's tests/unit/runtime/half_precision/test_dynamic_loss_scale.py, whose optimizer is that of stage 0.
TEST(LossScaler, IsDeepSpeedsOfStage0WhereItIsTolerant) {
  const auto scale_after = [](double initial, double minimum, const std::string& overflows) {
    LossScaler scaler(
        {.initial_scale = initial, .window = 2, .hysteresis = 2, .minimum_scale = minimum, .tolerant = true});
    for (const char overflow : overflows) scaler.update(overflow == '1');
    return scaler.scale();
  };
  EXPECT_EQ(scale_after(16, 1, "1"), 8);
  EXPECT_EQ(scale_after(16, 1, "1111"), 1);
  EXPECT_EQ(scale_after(16, 1, "11111111"), 1);
  EXPECT_EQ(scale_after(16, 2, "11111111"), 2);
  EXPECT_EQ(scale_after(256, 1, "11"), 64);
  EXPECT_EQ(scale_after(256, 1, "11000"), 128);
  EXPECT_EQ(scale_after(256, 1, "110001"), 64);
}

TEST(LossScaler, StaticScaleNeverMoves) {
  LossScaler scaler({.static_scale = 128});
  EXPECT_FALSE(scaler.dynamic());
  EXPECT_EQ(scaler.update(true), Outcome::kStatic);
  for (int i = 0; i < 3000; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, ContinuesFromASavedState) {
  const LossScalerOptions options{.initial_scale = 1024, .window = 3, .hysteresis = 2};
  LossScaler first(options);
  for (const bool overflow : {false, true, true, false, false}) first.update(overflow);
  LossScaler second(options);
  second.load(first.state());
  for (const bool overflow : {false, false, true, true, false, false, false}) {
    EXPECT_EQ(first.update(overflow), second.update(overflow));
    EXPECT_EQ(first.state(), second.state());
  }
}

TEST(LossScaler, TellsTheScaleThatAStepWouldLeave) {
  for (const LossScalerOptions& options :
       {LossScalerOptions{.initial_scale = 8, .window = 2, .hysteresis = 2, .minimum_scale = 2},
        LossScalerOptions{.initial_scale = 8, .window = 1, .hysteresis = 1, .minimum_scale = 2},
        LossScalerOptions{.initial_scale = 4, .window = 1, .minimum_scale = 3, .tolerant = true},
        LossScalerOptions{.static_scale = 16}}) {
    LossScaler scaler(options);
    for (const bool overflow : {false, false, true, true, false, true, true, false, false, false, true}) {
      const LossScalerState before = scaler.state();
      const std::optional<double> told = scaler.scale_after(overflow);
      EXPECT_EQ(scaler.state(), before);
      if (!told) {
        EXPECT_THROW(scaler.update(overflow), LossScaleError);
        continue;
      }
      scaler.update(overflow);
      EXPECT_EQ(scaler.scale(), *told);
    }
  }
}

TEST(LossScaler, RefusesValuesOutOfRange) {
  EXPECT_THROW(LossScaler({.static_scale = -1}), ConfigError);
  EXPECT_THROW(LossScaler({.window = 0}), ConfigError);
  EXPECT_THROW(LossScaler({.hysteresis = 0}), ConfigError);
  EXPECT_THROW(LossScaler({.minimum_scale = 0}), ConfigError);
}

}  // namespace
}  // namespace ds::optimizers
