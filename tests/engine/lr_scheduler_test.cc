#include "dsengine/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "core/check.h"
#include "optim/shard_optimizer.h"

namespace ds::engine {
namespace {

using testing::ElementsAre;

class NoOptimizer : public optimizers::SliceOptimizer {
 public:
  explicit NoOptimizer(std::vector<optimizers::GroupOptions> groups) : SliceOptimizer(std::move(groups)) {}
  void update(int64_t /*index*/, const at::Tensor& /*gradient*/, double /*gradient_scale*/) override {}
  optimizers::NamedStates states(int64_t /*index*/) override { return {}; }
  optimizers::OptimizerTraits traits() const override { return {}; }
  std::string name() const override { return "none"; }

 protected:
  void allocate_states(int64_t /*index*/, const optimizers::NewState& /*new_state*/) override {}
};

std::shared_ptr<NoOptimizer> two_groups() {
  return std::make_shared<NoOptimizer>(std::vector<optimizers::GroupOptions>{{.lr = 0.1}, {.lr = 0.2}});
}

TEST(LrScheduler, TheRuleIsAppliedAtConstructionAndAfterEachStep) {
  const auto optimizer = two_groups();
  std::vector<int64_t> seen;
  LrScheduler schedule(optimizer, [&](int64_t t, std::vector<optimizers::GroupOptions>& groups) {
    seen.push_back(t);
    groups[0].lr = static_cast<double>(t);
    groups[1].beta1 = 0.5;
  });
  EXPECT_EQ(schedule.last_batch_iteration(), -1);
  schedule.step();
  schedule.step();
  EXPECT_THAT(seen, ElementsAre(-1, 0, 1));
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(1.0, 0.2));
  EXPECT_EQ(optimizer->groups()[1].beta1, 0.5);
}

TEST(LrScheduler, AScheduleOfTheConfigRunsInDeepSpeedsOrder) {
  const auto optimizer = two_groups();
  const optimizers::WarmupLrOptions options{.warmup_num_steps = 4, .warmup_type = optimizers::WarmupType::kLinear};
  LrScheduler schedule(optimizer, LrScheduler::of(optimizers::make_lr_schedule(options, optimizer->groups(), true)));
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.0, 0.0)) << "the first step runs with warmup_min_lr";
  std::vector<double> seen;
  for (int k = 1; k <= 6; ++k) {
    schedule.step();
    seen.push_back(schedule.get_last_lr()[1]);
  }
  EXPECT_THAT(seen, testing::Pointwise(testing::DoubleEq(), {0.0, 0.05, 0.1, 0.15, 0.2, 0.2}));
}

TEST(LrScheduler, AFactorScalesEveryGroupsOwnRate) {
  const auto optimizer = two_groups();
  LrScheduler schedule(optimizer,
                       LrScheduler::scaled_by([](int64_t k) { return static_cast<double>(k + 1); }, {0.1, 0.2}));
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.1, 0.2));
  schedule.step();
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.2, 0.4));
}

TEST(LrScheduler, ALoadedStateGoesOnWhereItWasSaved) {
  const auto rule = LrScheduler::scaled_by([](int64_t k) { return 1.0 / static_cast<double>(k + 1); }, {0.1, 0.2});
  LrScheduler saved(two_groups(), rule);
  for (int i = 0; i < 5; ++i) saved.step();
  LrScheduler loaded(two_groups(), rule);
  loaded.load_last_batch_iteration(saved.last_batch_iteration());
  EXPECT_EQ(loaded.get_last_lr(), saved.get_last_lr());
  loaded.step();
  saved.step();
  EXPECT_EQ(loaded.get_last_lr(), saved.get_last_lr());
  EXPECT_THROW(loaded.load_last_batch_iteration(-2), UsageError);
}

TEST(LrScheduler, DrivesAClientOptimizer) {
  const auto client = std::make_shared<torch::optim::SGD>(std::vector<at::Tensor>{torch::zeros({1})}, 0.5);
  LrScheduler schedule(client, LrScheduler::scaled_by([](int64_t k) { return k == 0 ? 1.0 : 0.1; }, {0.5}));
  EXPECT_THAT(schedule.get_last_lr(), ElementsAre(0.5));
  schedule.step();
  EXPECT_EQ(client->param_groups()[0].options().get_lr(), 0.05);
}

}  // namespace
}  // namespace ds::engine
