// PyTorch's schedules by name, from a ds_config, against PyTorch's own rates (torch_schedules_reference.json, made by
// tests/optim/torch_schedules_reference.py).
#include <gmock/gmock.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "dsengine/lr_schedule.h"
#include "tests/engine/config/parse_text.h"

namespace ds::engine::config {
namespace {

using optimizers::GroupOptions;
using ::testing::HasSubstr;

std::vector<GroupOptions> groups_of(const std::vector<double>& rates) {
  std::vector<GroupOptions> groups;
  for (const double lr : rates) groups.push_back({.lr = lr});
  return groups;
}

TEST(TorchSchedules, HaveTorchsRates) {
  std::ifstream file(std::string(DS_SOURCE_DIR) + "/tests/optim/torch_schedules_reference.json");
  const auto reference = nlohmann::ordered_json::parse(file);
  ASSERT_GE(reference["cases"].size(), 14U);
  for (const auto& test : reference["cases"]) {
    SCOPED_TRACE(test["type"].dump() + test["params"].dump());
    const nlohmann::ordered_json section = {{"type", test["type"]}, {"params", test["params"]}};
    const DsConfig config = parse(nlohmann::ordered_json{{"train_batch_size", 1}, {"scheduler", section}});
    const auto base = test["base"].get<std::vector<double>>();
    const auto schedule = optimizers::make_lr_schedule(*config.scheduler.options, groups_of(base), false);
    EXPECT_EQ(schedule->name(), test["type"]);
    int64_t t = -1;
    for (const auto& expected : test["rates"]) {
      std::vector<GroupOptions> groups = groups_of(base);
      schedule->apply(t++, groups);
      for (size_t i = 0; i < groups.size(); ++i) {
        EXPECT_NEAR(groups[i].lr, expected[i].get<double>(), 1e-12 * base[i]) << "group " << i << ", t " << t - 1;
      }
    }
    EXPECT_EQ(to_json(config)["scheduler"]["params"]["last_batch_iteration"], -1);
  }
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
  EXPECT_THAT(refusal("CosineAnealingLR", "T_max: 5"), HasSubstr("did you mean CosineAnnealingLR?"));
}

}  // namespace
}  // namespace ds::engine::config
