// "auto": from the program, from the model, or the default.
#include <gmock/gmock.h>

#include "tests/config/parse_text.h"

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

// A file as Hugging Face's users have it, without their program.
constexpr const char* kLeftToTheTrainer =
    "{train_batch_size: 'auto', train_micro_batch_size_per_gpu: 'auto', gradient_accumulation_steps: 'auto',"
    " gradient_clipping: 'auto', bf16: {enabled: 'auto'},"
    " optimizer: {type: 'AdamW', params: {lr: 'auto', betas: 'auto', weight_decay: 'auto'}},"
    " scheduler: {type: 'WarmupDecayLR', params: {warmup_max_lr: 'auto', warmup_num_steps: 'auto',"
    " total_num_steps: 'auto'}}}";

TEST(AutoValues, AssumedOnesAreToldAsSuch) {
  AutoValues given;
  given.lr = 3e-4;
  const DsConfig config = parse_text(
      kLeftToTheTrainer, {.dp_world_size = 4, .auto_values = given, .assumed_values = hugging_face_values()});
  EXPECT_EQ(config.train_micro_batch_size_per_gpu, 8);
  EXPECT_EQ(config.train_batch_size, 32);
  EXPECT_EQ(config.gradient_accumulation_steps, 1);
  EXPECT_EQ(config.optimizer.values.weight_decay, 0.0);
  const auto schedule = std::get<optimizers::WarmupDecayLrOptions>(*config.scheduler.options);
  EXPECT_EQ(schedule.warmup_num_steps, 1);
  EXPECT_EQ(schedule.total_num_steps, 1000);
  EXPECT_THAT(*schedule.warmup_max_lr, ElementsAre(3e-4));  // the program's, before an assumed one
  const std::string text = chosen(config);
  EXPECT_THAT(text, HasSubstr("train_micro_batch_size_per_gpu = 8 from assumed\n"));
  EXPECT_THAT(text, HasSubstr("train_batch_size = 32 from the other batch sizes\n"));
  EXPECT_THAT(text, HasSubstr("optimizer.params.lr = 0.0003 from the program\n"));
  EXPECT_THAT(text, HasSubstr("bf16.enabled = false from assumed\n"));
}

// A written 0 is refused.
TEST(AutoValues, NoWarmupIsTheShortestOneThatAFileMaySay) {
  AutoValues values;
  values.warmup_num_steps = 0;
  for (const char* params : {"{type: 'WarmupLR', params: {warmup_num_steps: 'auto'}}",
                             "{type: 'WarmupCosineLR', params: {warmup_num_steps: 'auto', total_num_steps: 9}}"}) {
    const DsConfig config = parse_text(std::string("{scheduler: ") + params + "}", {.auto_values = values});
    EXPECT_THAT(chosen(config), HasSubstr("scheduler.params.warmup_num_steps = 0 from the program\n"));
    const nlohmann::ordered_json resolved = to_json(config);
    EXPECT_EQ(resolved["scheduler"]["params"]["warmup_num_steps"], 1);
    EXPECT_EQ(config.scheduler.params["warmup_num_steps"], 1);
    EXPECT_NO_THROW(parse(resolved));
  }
}

TEST(AutoValues, NothingIsAssumedUnasked) { EXPECT_THAT(refusal_of(kLeftToTheTrainer), HasSubstr("train_batch_size")); }

TEST(AutoValues, AnAssumedMicroBatchGivesWayToTheFilesSizes) {
  const ParseOptions assuming = {.dp_world_size = 2, .assumed_values = hugging_face_values()};
  const DsConfig whole = parse_text(
      "{train_batch_size: 48, train_micro_batch_size_per_gpu: 'auto', gradient_accumulation_steps: 4}", assuming);
  EXPECT_EQ(whole.train_micro_batch_size_per_gpu, 6);
  EXPECT_EQ(parse_text("{train_micro_batch_size_per_gpu: 3}", assuming).train_batch_size, 6);
  const DsConfig none = parse(object_of("{gradient_accumulation_steps: 2, zero_optimization: {stage: 1}}"), assuming);
  EXPECT_EQ(none.train_batch_size, 32);
  EXPECT_THAT(chosen(none), HasSubstr("train_micro_batch_size_per_gpu = 8 from assumed\n"));
}

TEST(AutoValues, AreSetFromTextByNameOrPath) {
  AutoValues values;
  set_auto_value(values, "lr", "1e-4");
  set_auto_value(values, "optimizer.params.betas", "[0.9, 0.95]");
  set_auto_value(values, "bf16.enabled", "yes");
  set_auto_value(values, "hidden_size", "4096");
  EXPECT_EQ(values.lr, 1e-4);
  EXPECT_THAT(*values.betas, ElementsAre(0.9, 0.95));
  EXPECT_EQ(values.bf16, true);
  EXPECT_EQ(values.hidden_size, 4096);
  const auto refused = [&](const char* key, const char* text) {
    try {
      set_auto_value(values, key, text);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("taken");
  };
  EXPECT_THAT(refused("weight_decai", "0"), HasSubstr("did you mean weight_decay?"));
  EXPECT_THAT(refused("zero_stage", "2"), HasSubstr("expected one of train_batch_size, "));
  EXPECT_EQ(refused("lr", "fast"), "lr: expected a number, found fast");
  EXPECT_EQ(refused("total_num_steps", "1.5"), "total_num_steps: expected an integer, found 1.5");
}

TEST(AutoValues, ThoseThatNothingAsksForAreFound) {
  AutoValues values;
  values.lr = 1e-3;
  values.weight_decay = 0.1;
  values.hidden_size = 8;
  const DsConfig config =
      parse_text("{optimizer: {type: 'AdamW', params: {lr: 2e-4, weight_decay: 'auto'}}}", {.auto_values = values});
  EXPECT_THAT(unused_auto_values(config, values), ElementsAre("optimizer.params.lr"));
  const DsConfig follows =
      parse_text("{optimizer: {type: 'AdamW'}, scheduler: {type: 'WarmupLR', params: {warmup_max_lr: 'auto'}}}",
                 {.auto_values = values});
  EXPECT_THAT(unused_auto_values(follows, values), ElementsAre("optimizer.params.weight_decay"));
}

}  // namespace
}  // namespace ds::engine::config
