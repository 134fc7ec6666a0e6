// Schedules against DeepSpeed's own (schedules_reference.json, made by schedules_reference.py).
#include "dsengine/lr_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "tests/support/thrown.h"

namespace ds::optimizers {
namespace {

using nlohmann::json;

PerGroup per_group(const json& value) {
  return value.is_array() ? value.get<PerGroup>() : PerGroup{value.get<double>()};
}

// Fills a field when the case names it.
struct Fields {
  const json& params;
  void read(const char* key, PerGroup& field) const {
    if (params.contains(key)) field = per_group(params[key]);
  }
  void read(const char* key, std::optional<PerGroup>& field) const {
    if (params.contains(key)) field = per_group(params[key]);
  }
  void read(const char* key, WarmupType& field) const {
    if (params.contains(key)) field = params[key] == "linear" ? WarmupType::kLinear : WarmupType::kLog;
  }
  template <class T>
  void read(const char* key, std::optional<T>& field) const {
    if (params.contains(key)) field = params[key].get<T>();
  }
  template <class T>
  void read(const char* key, T& field) const {
    if (params.contains(key)) field = params[key].get<T>();
  }
};

template <class Options>
void read_warmup(const Fields& fields, Options& o) {
  fields.read("warmup_min_lr", o.warmup_min_lr);
  fields.read("warmup_max_lr", o.warmup_max_lr);
}

template <class Options>
void read_warmup_steps(const Fields& fields, Options& o) {
  fields.read("warmup_num_steps", o.warmup_num_steps);
  fields.read("warmup_type", o.warmup_type);
}

LrScheduleOptions one_cycle(const Fields& fields) {
  OneCycleOptions o;
  fields.read("cycle_min_lr", o.cycle_min_lr);
  fields.read("cycle_max_lr", o.cycle_max_lr);
  fields.read("decay_lr_rate", o.decay_lr_rate);
  fields.read("cycle_first_step_size", o.cycle_first_step_size);
  fields.read("cycle_second_step_size", o.cycle_second_step_size);
  fields.read("cycle_first_stair_count", o.cycle_first_stair_count);
  fields.read("cycle_second_stair_count", o.cycle_second_stair_count);
  fields.read("decay_step_size", o.decay_step_size);
  fields.read("cycle_momentum", o.cycle_momentum);
  fields.read("cycle_min_mom", o.cycle_min_mom);
  fields.read("cycle_max_mom", o.cycle_max_mom);
  fields.read("decay_mom_rate", o.decay_mom_rate);
  return o;
}

LrScheduleOptions schedule_options_of(const json& test) {
  const Fields fields{test["params"]};
  const std::string type = test["type"];
  if (type == "WarmupLR") {
    WarmupLrOptions o;
    read_warmup(fields, o);
    read_warmup_steps(fields, o);
    return o;
  }
  if (type == "WarmupDecayLR") {
    WarmupDecayLrOptions o;
    read_warmup(fields, o);
    read_warmup_steps(fields, o);
    fields.read("total_num_steps", o.total_num_steps);
    return o;
  }
  if (type == "WarmupCosineLR") {
    WarmupCosineLrOptions o;
    read_warmup_steps(fields, o);
    fields.read("total_num_steps", o.total_num_steps);
    fields.read("warmup_min_ratio", o.warmup_min_ratio);
    fields.read("cos_min_ratio", o.cos_min_ratio);
    return o;
  }
  if (type == "LRRangeTest") {
    LrRangeTestOptions o;
    fields.read("lr_range_test_min_lr", o.lr_range_test_min_lr);
    fields.read("lr_range_test_step_size", o.lr_range_test_step_size);
    fields.read("lr_range_test_step_rate", o.lr_range_test_step_rate);
    fields.read("lr_range_test_staircase", o.lr_range_test_staircase);
    return o;
  }
  return one_cycle(fields);
}

double relative_error(double found, double expected) {
  return found == expected ? 0.0 : std::abs(found - expected) / std::max(std::abs(expected), 1e-300);
}

json reference() {
  std::ifstream file(DS_TEST_FOLDER "/schedules_reference.json");
  return json::parse(file).at("schedules");
}

TEST(LrSchedule, RunsStepsWithDeepSpeedsValues) {
  int64_t points = 0;
  double worst = 0;
  for (const json& test : reference()) {
    std::vector<GroupOptions> groups;
    for (const double lr : test["group_lr"]) groups.push_back({.lr = lr});
    const auto schedule = make_lr_schedule(schedule_options_of(test), groups, /*optimizer_uses_betas=*/true);
    EXPECT_EQ(schedule->name(), test["type"].get<std::string>());
    for (const json& at : test["at"]) {
      const int64_t k = at[0];
      schedule->apply(k - 1, groups);
      for (size_t i = 0; i < groups.size(); ++i) {
        const double error =
            std::max({relative_error(groups[i].lr, at[1][i]), relative_error(groups[i].beta1, at[2][i][0]),
                      relative_error(groups[i].beta2, at[2][i][1])});
        EXPECT_LE(error, 1e-12) << test["type"] << " " << test["params"] << " step " << k << " group " << i << ": lr "
                                << groups[i].lr << " expected " << at[1][i];
        worst = std::max(worst, error);
        ++points;
      }
    }
  }
  RecordProperty("points", std::to_string(points));
  RecordProperty("worst_relative_error", cat(worst));
  EXPECT_GT(points, 2000);
}

TEST(LrSchedule, IsAPureFunctionOfTheIteration) {
  std::vector<GroupOptions> groups(1);
  const auto schedule =
      make_lr_schedule(WarmupDecayLrOptions{.total_num_steps = 50, .warmup_num_steps = 10}, groups, true);
  schedule->apply(33, groups);
  const double first = groups[0].lr;
  for (int64_t t = -1; t < 60; ++t) schedule->apply(t, groups);
  schedule->apply(33, groups);
  EXPECT_EQ(groups[0].lr, first);
}

TEST(LrSchedule, OneCycleLeavesTheBetasOfAnOptimizerWithoutThem) {
  std::vector<GroupOptions> groups(1);
  const auto schedule = make_lr_schedule(OneCycleOptions{.cycle_min_lr = {0.1}, .cycle_max_lr = {0.2}}, groups, false);
  schedule->apply(5, groups);
  EXPECT_EQ(groups[0].beta1, GroupOptions{}.beta1);
  EXPECT_EQ(groups[0].beta2, GroupOptions{}.beta2);
}

template <class Options>
std::string error_of(const Options& options) {
  return test::thrown_by<ConfigError>([&] { make_lr_schedule(options, std::vector<GroupOptions>(3), true); });
}

TEST(LrSchedule, NamesTheKeyOfABadValue) {
  using testing::HasSubstr;
  EXPECT_THAT(error_of(WarmupLrOptions{.warmup_num_steps = -1}), HasSubstr("scheduler.params.warmup_num_steps"));
  EXPECT_THAT(error_of(WarmupLrOptions{.warmup_min_lr = {1, 2}}),
              HasSubstr("warmup_min_lr: expected a number, or one for each of the 3 parameter groups, found 2 values"));
  EXPECT_THAT(error_of(LrRangeTestOptions{.lr_range_test_step_size = 0}), HasSubstr("lr_range_test_step_size"));
  EXPECT_THAT(error_of(OneCycleOptions{.cycle_max_lr = {1}}), HasSubstr("cycle_min_lr"));
  EXPECT_THAT(error_of(OneCycleOptions{.cycle_min_lr = {1}, .cycle_max_lr = {1}, .cycle_first_step_size = 0}),
              HasSubstr("cycle_first_step_size: expected at least 1, found 0"));
  EXPECT_THAT(error_of(StepLrOptions{}), HasSubstr("scheduler.params.step_size: expected at least 1, found 0"));
  EXPECT_THAT(error_of(LinearLrOptions{.start_factor = 0}), HasSubstr("start_factor"));
  EXPECT_THAT(error_of(CosineAnnealingWarmRestartsOptions{.t_0 = 3, .t_mult = 0}), HasSubstr("T_mult"));
}

// No step at all counts as two, as DeepSpeed counts one. DeepSpeed refuses it, as a ds_config does here.
TEST(LrSchedule, NoWarmupIsTheShortestOne) {
  const std::vector<GroupOptions> base(1, GroupOptions{.lr = 0.1});
  const auto none = make_lr_schedule(WarmupLrOptions{.warmup_num_steps = 0}, base, true);
  const auto two = make_lr_schedule(WarmupLrOptions{.warmup_num_steps = 2}, base, true);
  for (int64_t t = -1; t < 5; ++t) {
    std::vector<GroupOptions> found = base;
    std::vector<GroupOptions> expected = base;
    none->apply(t, found);
    two->apply(t, expected);
    EXPECT_EQ(found[0].lr, expected[0].lr) << t;
  }
}

}  // namespace
}  // namespace ds::optimizers
