// What a program reads off the engine: the loss scale through overflows, and samples that were really used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "optim/loss_scaler.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::ElementsAre;

nlohmann::ordered_json float16_config(int stage, const nlohmann::ordered_json& optimizer = {}) {
  nlohmann::ordered_json config = small_config(stage, 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 4}};
  if (!optimizer.is_null()) config["optimizer"] = optimizer;
  return config;
}

void overflow_once(Engine& engine, SmallNet& model) {
  engine.backward(model->loss(sample(0, engine.global_rank())).to(torch::kFloat) * 1e30);
  engine.step();
}

// DeepSpeed's test_all_overflow: its scaler of stage 0 knows no hysteresis, and stays at the minimum.
TEST(LossScales, AtStage0OverflowsGoOnAtTheMinimum) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), float16_config(0), communicator).engine;
    const State before = copy_of(engine->fp32_state_dict());
    std::vector<double> scales;
    for (int i = 0; i < 8; ++i) {
      overflow_once(*engine, model);
      scales.push_back(engine->loss_scale());
    }
    EXPECT_THAT(scales, ElementsAre(8, 4, 2, 1, 1, 1, 1, 1));
    EXPECT_EQ(engine->skipped_steps(), 8);
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
  });
}

// Its scaler of stages 1 to 3.
class PartitionedLossScales : public ::testing::TestWithParam<int> {};

TEST_P(PartitionedLossScales, OverflowsUseUpHysteresisAndEndAtTheMinimum) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), float16_config(GetParam()), communicator).engine;
    std::vector<double> scales;
    const auto overflow = [&] {
      overflow_once(*engine, model);
      scales.push_back(engine->loss_scale());
    };
    for (int i = 0; i < 5; ++i) overflow();
    EXPECT_THAT(scales, ElementsAre(16, 8, 4, 2, 1));
    EXPECT_THROW(overflow(), optimizers::LossScaleError);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, PartitionedLossScales, ::testing::Values(1, 2, 3), stage_name);

// DeepSpeed's onebit::overflow tests.
TEST(LossScales, CompressedOptimizersOutlastOverflows) {
  const nlohmann::ordered_json optimizers[] = {
      {{"type", "OneBitAdam"}, {"params", {{"lr", 1e-3}, {"freeze_step", 2}}}},
      {{"type", "OneBitLamb"}, {"params", {{"lr", 1e-3}, {"freeze_step", 2}}}},
      {{"type", "ZeroOneAdam"}, {"params", {{"lr", 1e-3}, {"var_freeze_step", 4}}}}};
  for (const auto& optimizer : optimizers) {
    SCOPED_TRACE(optimizer.dump());
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), float16_config(0, optimizer), communicator).engine;
      for (int i = 0; i < 6; ++i) {
        engine->backward(model->loss(sample(i, communicator.rank())));
        engine->step();
        EXPECT_TRUE(engine->was_step_applied()) << i;
      }
      for (int i = 0; i < 30; ++i) overflow_once(*engine, model);
      EXPECT_EQ(engine->loss_scale(), 1);
      EXPECT_EQ(engine->skipped_steps(), 30);
    });
  }
}

class CountedSamples : public ::testing::TestWithParam<int> {};

// DeepSpeed's test_varying_backward_count, with batches of 8 on two ranks.
TEST_P(CountedSamples, AreThoseOfAllBackwardsWhereTheProgramCounts) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    nlohmann::ordered_json config = small_config(GetParam(), 2);
    config["managed_gradient_accumulation"] = false;
    const auto engine = start(model.ptr(), config, communicator).engine;
    std::vector<int64_t> samples;
    for (const int backwards : {2, 5, 3}) {
      for (int i = 0; i < backwards; ++i) engine->backward(model->loss(sample(i, communicator.rank())));
      engine->step();
      samples.push_back(engine->global_samples());
    }
    EXPECT_THAT(samples, ElementsAre(2 * 8, 7 * 8, 10 * 8));
    EXPECT_EQ(engine->global_steps(), 3);
  });
}

TEST_P(CountedSamples, AreThoseOfMicroBatchesElsewhere) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 2), communicator).engine;
    const auto micro_batch = [&] {
      for (int i = 0; i < 2; ++i) engine->backward(model->loss(sample(i, communicator.rank())));  // two losses of one
      engine->step();
    };
    micro_batch();
    micro_batch();
    EXPECT_EQ(engine->global_samples(), 16);
    micro_batch();
    engine->set_gradient_accumulation_boundary(false);
    micro_batch();
    engine->set_gradient_accumulation_boundary(true);
    micro_batch();
    EXPECT_EQ(engine->global_samples(), 40);  // an accumulation of three
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, CountedSamples, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
