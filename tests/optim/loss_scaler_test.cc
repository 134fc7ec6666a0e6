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

TEST(LossScaler, RefusesValuesOutOfRange) {
  EXPECT_THROW(LossScaler({.static_scale = -1}), ConfigError);
  EXPECT_THROW(LossScaler({.window = 0}), ConfigError);
  EXPECT_THROW(LossScaler({.hysteresis = 0}), ConfigError);
  EXPECT_THROW(LossScaler({.minimum_scale = 0}), ConfigError);
}

}  // namespace
}  // namespace ds::optimizers
