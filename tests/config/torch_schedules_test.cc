// PyTorch's schedules by name, from a ds_config, against PyTorch's own rates (torch_schedules_reference.json, made by
// tests/optim/torch_schedules_reference.py).
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "dsengine/lr_schedule.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using optimizers::GroupOptions;
using ::testing::HasSubstr;

std::vector<GroupOptions> groups_of(const std::vector<double>& rates) {
  std::vector<GroupOptions> groups;
  for (const double lr : rates) groups.push_back({.lr = lr, .momentum = 0.5});
  return groups;
}

TEST(TorchSchedules, HaveTorchsRates) {
  std::ifstream file(std::string(DS_SOURCE_DIR) + "/tests/optim/torch_schedules_reference.json");
  const auto reference = nlohmann::ordered_json::parse(file);
  ASSERT_GE(reference["cases"].size(), 20U);
  for (const auto& test : reference["cases"]) {
    SCOPED_TRACE(test["type"].dump() + test["params"].dump());
    const nlohmann::ordered_json section = {{"type", test["type"]}, {"params", test["params"]}};
    const DsConfig config = parse(nlohmann::ordered_json{{"train_batch_size", 1}, {"scheduler", section}});
    const auto base = test["base"].get<std::vector<double>>();
    const auto schedule = optimizers::make_lr_schedule(*config.scheduler.options, groups_of(base), false);
    EXPECT_EQ(schedule->name(), test["type"].get<std::string>());
    int64_t t = -1;
    for (const auto& expected : test["rates"]) {
      std::vector<GroupOptions> groups = groups_of(base);
      const double momentum = test["momenta"][static_cast<size_t>(t + 1)].get<double>();
      schedule->apply(t++, groups);
      for (size_t i = 0; i < groups.size(); ++i) {
        EXPECT_NEAR(groups[i].lr, expected[i].get<double>(), 1e-12 * base[i]) << "group " << i << ", t " << t - 1;
        EXPECT_NEAR(groups[i].momentum, momentum, 1e-12) << "group " << i << ", t " << t - 1;
      }
    }
    EXPECT_EQ(to_json(config)["scheduler"]["params"]["last_batch_iteration"], -1);
  }
}

// Of an optimizer with betas beta1 runs the other way; without betas and momentum there is nothing to run.
TEST(TorchSchedules, CyclesTurnBetasOrMomentum) {
  const optimizers::OneCycleLrOptions options{.max_lr = {0.1}, .total_steps = 20};
  std::vector<GroupOptions> groups(1);
  optimizers::make_lr_schedule(options, groups, /*optimizer_uses_betas=*/true)->apply(5, groups);
  EXPECT_LT(groups[0].beta1, 0.87);
  EXPECT_EQ(groups[0].momentum, 0);
  EXPECT_EQ(groups[0].beta2, GroupOptions().beta2);
  EXPECT_THAT([&] { optimizers::make_lr_schedule(options, std::vector<GroupOptions>(1), false); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("cycle_momentum: expected an optimizer with betas")));
}

TEST(TorchSchedules, AStepBeyondTheLastIsAnError) {
  const auto schedule = optimizers::make_lr_schedule(optimizers::OneCycleLrOptions{.max_lr = {0.1}, .total_steps = 20},
                                                     groups_of({0.1}), false);
  std::vector<GroupOptions> groups = groups_of({0.1});
  schedule->apply(19, groups);
  EXPECT_THAT([&] { schedule->apply(20, groups); },
              ::testing::ThrowsMessage<ConfigError>(HasSubstr("step 21 is asked of a schedule of 20 steps")));
}

TEST(TorchSchedules, WhatTheyNeedIsAskedFor) {
  const auto refusal = [](const std::string& type, const std::string& params) {
    return refusal_of("{scheduler: {type: '" + type + "', params: {" + params + "}}}");
  };
  EXPECT_THAT(refusal("StepLR", ""), HasSubstr("StepLR needs \"step_size\", which is missing"));
  EXPECT_THAT(refusal("StepLR", "step_size: 0"), HasSubstr("scheduler.params.step_size: expected"));
  EXPECT_THAT(refusal("ExponentialLR", ""), HasSubstr("needs \"gamma\""));
  EXPECT_THAT(refusal("CosineAnnealingLR", "T_max: 0"), HasSubstr("T_max"));
  EXPECT_THAT(refusal("MultiStepLR", "milestones: 3"), HasSubstr("milestones"));
  EXPECT_THAT(refusal("LinearLR", "end_factor: 2"), HasSubstr("end_factor"));
  EXPECT_THAT(refusal("CosineAnnealingLR", "T_max: 5, gamma: 1"), HasSubstr("gamma"));
  EXPECT_THAT(refusal("CyclicLR", "base_lr: 0.1"), HasSubstr("needs \"max_lr\""));
  EXPECT_THAT(refusal("OneCycleLR", "max_lr: 0.1, anneal_strategy: 'sin'"), HasSubstr("anneal_strategy"));
  EXPECT_THAT(refusal("CosineAnealingLR", "T_max: 5"), HasSubstr("did you mean CosineAnnealingLR?"));
}

}  // namespace
}  // namespace ds::engine::config
