// "auto": from the program, from the model, or the default.
#include <gmock/gmock.h>

#include "tests/engine/config/parse_text.h"

namespace ds::engine::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string chosen(const DsConfig& config) {
  std::string text;
  for (const ResolvedAuto& entry : config.resolved_auto) {
    text += cat(entry.path, " = ", entry.value.dump(), " from ", entry.source, "\n");
  }
  return text;
}

TEST(AutoValues, TakesWhatTheProgramKnows) {
  AutoValues values;
  values.lr = 5e-4;
  values.betas = {0.9, 0.98};
  values.eps = 1e-6;
  values.weight_decay = 0.01;
  values.gradient_clipping = 0.5;
  values.bf16 = true;
  values.warmup_num_steps = 7;
  values.total_num_steps = 70;
  const DsConfig config = parse_text(
      "{gradient_clipping: 'auto', bf16: {enabled: 'auto'},"
      " optimizer: {type: 'AdamW', params: {lr: 'auto', betas: 'auto', eps: 'auto', weight_decay: 'auto'}},"
      " scheduler: {type: 'WarmupDecayLR', params: {warmup_min_lr: 'auto', warmup_max_lr: 'auto',"
      " warmup_num_steps: 'auto', total_num_steps: 'auto'}}}",
      {.auto_values = values});
  EXPECT_EQ(config.optimizer.values.lr, 5e-4);
  EXPECT_EQ(config.optimizer.params["lr"], 5e-4);
  EXPECT_THAT(config.optimizer.values.betas, ElementsAre(0.9, 0.98));
  EXPECT_EQ(config.optimizer.values.eps, 1e-6);
  EXPECT_EQ(config.optimizer.values.weight_decay, 0.01);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_TRUE(config.bf16.enabled);
  const auto schedule = std::get<optimizers::WarmupDecayLrOptions>(*config.scheduler.options);
  EXPECT_EQ(schedule.total_num_steps, 70);
  EXPECT_EQ(schedule.warmup_num_steps, 7);
  EXPECT_THAT(*schedule.warmup_max_lr, ElementsAre(5e-4));
  EXPECT_THAT(chosen(config), HasSubstr("optimizer.params.lr = 0.0005 from the program\n"));
  EXPECT_THAT(chosen(config), HasSubstr("scheduler.params.warmup_min_lr = 0.0 from default\n"));
}

TEST(AutoValues, ElseTheDefault) {
  const DsConfig config = parse_text(
      "{gradient_clipping: 'auto', fp16: {enabled: 'auto'}, zero_optimization: {stage: 'auto'}, pipeline: {stages: "
      "'auto'}}");
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_FALSE(config.fp16.enabled);
  EXPECT_EQ(config.zero_optimization.stage, 0);
  EXPECT_EQ(config.pipeline.stages, std::nullopt);
  EXPECT_THAT(chosen(config), HasSubstr("gradient_clipping = 1.0 from default\n"));
}

TEST(AutoValues, TheScheduleFollowsTheOptimizer) {
  const DsConfig config = parse_text(
      "{optimizer: {type: 'Adam', params: {lr: 2e-4}}, scheduler: {type: 'WarmupLR', params: {warmup_max_lr: "
      "'auto'}}}");
  EXPECT_THAT(*std::get<optimizers::WarmupLrOptions>(*config.scheduler.options).warmup_max_lr, ElementsAre(2e-4));
  EXPECT_THAT(chosen(config), HasSubstr("from optimizer.params.lr"));
}

TEST(AutoValues, Stage3SizesFollowTheHiddenSize) {
  AutoValues values;
  values.hidden_size = 100;
  const ZeroSection zero =
      parse_text(
          "{zero_optimization: {stage: 3, reduce_bucket_size: 'auto', stage3_prefetch_bucket_size: 'auto', "
          "stage3_param_persistence_threshold: 'auto'}}",
          {.auto_values = values})
          .zero_optimization;
  EXPECT_EQ(zero.reduce_bucket_size, 10000);
  EXPECT_EQ(zero.stage3_prefetch_bucket_size, 9000);
  EXPECT_EQ(zero.stage3_param_persistence_threshold, 1000);
}

TEST(AutoValues, WhatNobodyKnowsIsRefused) {
  EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupDecayLR', params: {total_num_steps: 'auto'}}}"),
              HasSubstr("which the program does not give"));
}

}  // namespace
}  // namespace ds::engine::config
