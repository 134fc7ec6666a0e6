// ReduceLROnPlateau against LibTorch's.
#include "optim/plateau.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <random>
#include <vector>

#include "core/check.h"

namespace ds::optimizers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using Theirs = torch::optim::ReduceLROnPlateauScheduler;

// Values that float32, in which LibTorch's computes, has as they are.
std::vector<double> rates_of_torch(const ReduceLrOnPlateauOptions& options, const std::vector<double>& values) {
  torch::optim::SGD optimizer({torch::zeros({1})}, torch::optim::SGDOptions(0.5));
  Theirs schedule(optimizer, options.largest ? Theirs::max : Theirs::min, static_cast<float>(options.factor),
                  static_cast<int>(options.patience), options.threshold, options.relative ? Theirs::rel : Theirs::abs,
                  static_cast<int>(options.cooldown), {static_cast<float>(options.min_lr[0])}, options.eps);
  std::vector<double> rates;
  for (const double value : values) {
    schedule.step(static_cast<float>(value));
    rates.push_back(optimizer.param_groups()[0].options().get_lr());
  }
  return rates;
}

std::vector<double> rates_of(const ReduceLrOnPlateauOptions& options, const std::vector<double>& values) {
  std::vector<GroupOptions> groups = {{.lr = 0.5}};
  Plateau plateau(options, 1);
  std::vector<double> rates;
  for (const double value : values) {
    plateau.observe(value, groups);
    rates.push_back(groups[0].lr);
  }
  return rates;
}

TEST(Plateau, RatesAreTorchs) {
  std::mt19937 random(7);
  int moved = 0;
  for (int trial = 0; trial < 300; ++trial) {
    if (trial % 4 == 3) continue;  // "max" with "abs", where LibTorch's rates never fall
    const ReduceLrOnPlateauOptions options{.largest = trial % 2 == 1,
                                           .factor = trial % 3 == 0 ? 0.25 : 0.5,
                                           .patience = trial % 5,
                                           .threshold = trial % 7 == 0 ? 0.25 : 0.03125,
                                           .relative = trial % 4 < 2,
                                           .cooldown = trial % 6,
                                           .min_lr = {trial % 8 == 0 ? 0.0625 : 0.0},
                                           .eps = trial % 9 == 0 ? 0.125 : 1e-8};
    std::vector<double> values;
    for (int i = 0; i < 40; ++i) values.push_back(static_cast<double>(random() % 64) / 8 + 1);
    const std::vector<double> rates = rates_of(options, values);
    moved += rates.back() < 0.5 ? 1 : 0;
    ASSERT_EQ(rates, rates_of_torch(options, values)) << "trial " << trial;
  }
  EXPECT_GT(moved, 180);
}

// As torch.optim.lr_scheduler states it: better means above the best one by more than the threshold.
TEST(Plateau, TheLargestByAnAbsoluteThreshold) {
  const std::vector<double> rates = rates_of(
      {.largest = true, .factor = 0.5, .patience = 0, .threshold = 1, .relative = false}, {5, 6, 6.5, 7, 7.5, 7.75});
  EXPECT_THAT(rates, testing::ElementsAre(0.5, 0.25, 0.25, 0.125, 0.0625, 0.0625));
}

TEST(Plateau, WhatIsNotFiniteIsNotBetter) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> rates = rates_of({.factor = 0.5, .patience = 1}, {kNan, kNan, 1.0, kInfinity, kNan});
  EXPECT_THAT(rates, testing::ElementsAre(0.5, 0.25, 0.25, 0.25, 0.125));
}

TEST(Plateau, GoesOnFromItsState) {
  const ReduceLrOnPlateauOptions options{.factor = 0.5, .patience = 2, .cooldown = 3};
  std::vector<GroupOptions> whole = {{.lr = 1}};
  std::vector<GroupOptions> parted = {{.lr = 1}};
  Plateau one(options, 1);
  Plateau other(options, 1);
  for (int i = 0; i < 30; ++i) {
    if (i == 13) {
      const PlateauState state = other.state();
      EXPECT_EQ(state.values, 13);
      other.load({});
      other.load(state);
    }
    one.observe(i % 4, whole);
    other.observe(i % 4, parted);
    EXPECT_EQ(whole[0].lr, parted[0].lr);
  }
  EXPECT_LT(whole[0].lr, 0.2);
}

TEST(Plateau, EachGroupHasItsOwnMinimum) {
  std::vector<GroupOptions> groups = {{.lr = 1}, {.lr = 2}};
  Plateau plateau({.factor = 0.1, .patience = 0, .min_lr = {0.5, 0.25}}, 2);
  for (int i = 0; i < 4; ++i) plateau.observe(3, groups);
  EXPECT_EQ(groups[0].lr, 0.5);
  EXPECT_EQ(groups[1].lr, 0.25);
  EXPECT_THAT([] { Plateau({.min_lr = {1, 2, 3}}, 2); }, ThrowsMessage<ConfigError>(HasSubstr("min_lr")));
  EXPECT_THAT([] { Plateau({.factor = 1}, 2); }, ThrowsMessage<ConfigError>(HasSubstr("scheduler.params.factor")));
}

}  // namespace
}  // namespace ds::optimizers
