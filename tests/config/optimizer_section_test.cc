// optimizer and scheduler.
#include <gmock/gmock.h>

#include "config/supported.h"
#include "tests/config/parse_text.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

OptimizerSection optimizer(const std::string& section) { return parse_text("{optimizer: " + section + "}").optimizer; }

TEST(OptimizerSection, TypesInAnyCase) {
  EXPECT_EQ(optimizer("{type: 'adamw'}").type, "AdamW");
  EXPECT_EQ(optimizer("{type: 'ADAM'}").type, "Adam");
  EXPECT_EQ(optimizer("{type: 'lion'}").type, "Lion");
  EXPECT_EQ(optimizer("{type: 'SGD'}").type, "SGD");
}

TEST(OptimizerSection, AdamMeansAdamWUnlessToldOtherwise) {
  EXPECT_TRUE(optimizer("{type: 'Adam'}").decoupled_weight_decay());
  EXPECT_FALSE(optimizer("{type: 'Adam', params: {adam_w_mode: false}}").decoupled_weight_decay());
  EXPECT_TRUE(optimizer("{type: 'AdamW', params: {adam_w_mode: false}}").decoupled_weight_decay());
}

TEST(OptimizerSection, EachTypeHasItsDefaults) {
  EXPECT_EQ(optimizer("{type: 'AdamW'}").values.lr, 1e-3);
  EXPECT_EQ(optimizer("{type: 'AdamW'}").values.eps, 1e-8);
  EXPECT_EQ(optimizer("{type: 'AdamW'}").values.weight_decay, 0);
  EXPECT_EQ(optimizer("{type: 'Adagrad'}").values.lr, 1e-2);
  EXPECT_EQ(optimizer("{type: 'Adagrad'}").values.eps, 1e-10);
  const OptimizerParams muon = optimizer("{type: 'Muon'}").values;
  EXPECT_EQ(muon.momentum, 0.95);
  EXPECT_EQ(muon.ns_method, "gram");
  EXPECT_THAT(muon.betas, ElementsAre(0.9, 0.95));
  EXPECT_EQ(muon.muon_lr, std::nullopt);
  EXPECT_EQ(optimizer("{type: 'Lamb'}").values.max_coeff, 10);
  EXPECT_EQ(optimizer("{type: 'Lamb'}").values.min_coeff, 0.01);
  EXPECT_EQ(optimizer("{type: 'ZeroOneAdam'}").values.local_step_scaler, 32678);
}

TEST(OptimizerSection, ReadsItsParameters) {
  const OptimizerSection section =
      optimizer("{type: 'AdamW', params: {lr: '3e-4', betas: [0.8, 0.999], eps: 1e-7, weight_decay: 3e-7}}");
  EXPECT_EQ(section.values.lr, 3e-4);
  EXPECT_THAT(section.values.betas, ElementsAre(0.8, 0.999));
  EXPECT_EQ(section.values.weight_decay, 3e-7);
  EXPECT_EQ(section.params["eps"], 1e-7);
}

TEST(OptimizerSection, RefusesWhatTheTypeDoesNotKnow) {
  EXPECT_THAT(refusal_of("{optimizer: {type: 'AdamW', params: {learning: 1}}}"),
              AllOf(HasSubstr("optimizer.params.learning"), HasSubstr("known are \"lr\"")));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Adam', params: {weight_decy: 1}}}"),
              HasSubstr("did you mean weight_decay?"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Adam', params: {max_grad_norm: 1}}}"),
              HasSubstr("use the top-level key \"gradient_clipping\""));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'AdanW'}}"), HasSubstr("did you mean AdamW?"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'my.own.Optimizer'}}"), HasSubstr("expected one of"));
}

TEST(OptimizerSection, ChecksRanges) {
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Adam', params: {lr: -1}}}"), HasSubstr("expected a number >= 0"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Adam', params: {betas: [0.9, 1]}}}"), HasSubstr("< 1, found 1"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Adam', params: {betas: 0.9}}}"), HasSubstr("a list of 2"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'SGD', params: {nesterov: true}}}"), HasSubstr("momentum > 0"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Muon', params: {ns_method: 'other'}}}"), HasSubstr("\"standard\""));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Muon', params: {per_head_muon: true}}}"), HasSubstr("needs head_dim"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Lamb', params: {amsgrad: true}}}"), HasSubstr("expected false"));
}

TEST(OptimizerSection, ZeroNeedsPermissionForUntestedOnes) {
  const std::string text = "optimizer: {type: 'SGD', params: {lr: 0.1}}, zero_optimization: {stage: 1}}";
  EXPECT_THAT(refusal_of("{" + text), HasSubstr("zero_allow_untested_optimizer"));
  EXPECT_EQ(refusal_of("{zero_allow_untested_optimizer: true, " + text), "");
}

TEST(OptimizerSection, LambNeedsADynamicLossScale) {
  EXPECT_THAT(refusal_of("{optimizer: {type: 'Lamb'}, fp16: {enabled: true, loss_scale: 128}}"),
              HasSubstr("expected 0 (dynamic)"));
}

TEST(SchedulerSection, ReadsTheFiveTypes) {
  const auto options = [](const std::string& section) {
    return *parse_text("{scheduler: " + section + "}").scheduler.options;
  };
  const auto warmup = std::get<optimizers::WarmupLrOptions>(
      options("{type: 'WarmupLR', params: {warmup_max_lr: 3e-4, warmup_num_steps: 10, warmup_type: 'linear'}}"));
  EXPECT_THAT(*warmup.warmup_max_lr, ElementsAre(3e-4));
  EXPECT_EQ(warmup.warmup_num_steps, 10);
  EXPECT_EQ(warmup.warmup_type, optimizers::WarmupType::kLinear);
  EXPECT_EQ(
      std::get<optimizers::WarmupDecayLrOptions>(options("{type: 'WarmupDecayLR', params: {total_num_steps: 50}}"))
          .total_num_steps,
      50);
  EXPECT_EQ(
      std::get<optimizers::WarmupCosineLrOptions>(options("{type: 'WarmupCosineLR', params: {total_num_steps: 50}}"))
          .cos_min_ratio,
      0.0001);
  EXPECT_EQ(std::get<optimizers::LrRangeTestOptions>(options("{type: 'LRRangeTest'}")).lr_range_test_step_size, 2000);
  EXPECT_THAT(std::get<optimizers::OneCycleOptions>(
                  options("{type: 'OneCycle', params: {cycle_min_lr: [1e-5, 1e-6], cycle_max_lr: 1e-3}}"))
                  .cycle_min_lr,
              ElementsAre(1e-5, 1e-6));
}

TEST(Scheduler, AnUnknownWarmupTypeIsLogAsInDeepSpeed) {
  const std::string text = "{scheduler: {type: 'WarmupLR', params: {warmup_type: 'cubic'}}}";
  const DsConfig config = parse_text(text);
  ASSERT_TRUE(config.scheduler.options.has_value());
  EXPECT_EQ(std::get<optimizers::WarmupLrOptions>(*config.scheduler.options).warmup_type, optimizers::WarmupType::kLog);
  EXPECT_THAT(warnings_of(text), HasSubstr("scheduler.params.warmup_type: expected \"log\" or \"linear\", found "
                                           "\"cubic\"; taken as \"log\""));
}

TEST(SchedulerSection, RefusesMistakes) {
  EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupDecayLR'}}"), HasSubstr("needs \"total_num_steps\""));
  EXPECT_THAT(refusal_of("{scheduler: {type: 'OneCycle', params: {cycle_min_lr: 1}}}"), HasSubstr("cycle_max_lr"));
  EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupLr2'}}"), HasSubstr("did you mean WarmupLR?"));
  EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupLR', params: {warmup_num_steps: -1}}}"), HasSubstr("> 0"));
  for (const std::string type : {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"}) {
    const std::string text = "{scheduler: {type: '" + type + "', params: {warmup_num_steps: 0, total_num_steps: 9}}}";
    EXPECT_THAT(refusal_of(text), HasSubstr("scheduler.params.warmup_num_steps: expected an integer > 0, found 0"))
        << type;
  }
  EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupCosineLR', params: {zzz: 1, total_num_steps: 9}}}"),
              HasSubstr("\"cos_min_ratio\", \"warmup_type\", \"last_batch_iteration\""))
      << "each known key once";
  EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupLR', params: {total_num_steps: 9}}}"),
              AllOf(HasSubstr("unknown key"), HasSubstr("\"warmup_max_lr\"")));
}

TEST(OptimizerSection, TextIsTrueForTorchAdam) {
  const std::string text = "{optimizer: {type: 'AdamW', params: {torch_adam: 'torch_impl'}}}";
  EXPECT_TRUE(parse_text(text).optimizer.values.torch_adam);
  EXPECT_THAT(warnings_of(text),
              HasSubstr("optimizer.params.torch_adam: expected true or false, found \"torch_impl\""));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'AdamW', params: {torch_adam: ''}}}"), HasSubstr("torch_adam"));
  EXPECT_FALSE(parse_text("{optimizer: {type: 'AdamW', params: {torch_adam: 'off'}}}").optimizer.values.torch_adam);
}

TEST(SchedulerSection, NoStepsInOtherWordsAreRefusedToo) {
  for (const std::string none : {"0.0", "'0'", "false"}) {
    EXPECT_THAT(refusal_of("{scheduler: {type: 'WarmupLR', params: {warmup_num_steps: " + none + "}}}"),
                AllOf(HasSubstr("1 mistake"), HasSubstr("warmup_num_steps: expected an integer > 0, found ")))
        << none;
  }
  EXPECT_THAT(warnings_of("{scheduler: {type: 'WarmupLR', params: {warmup_num_steps: '10'}}}"),
              HasSubstr("scheduler.params.warmup_num_steps: found text, \"10\", read as the number 10"));
}

TEST(SchedulerSection, MayStartLater) {
  const std::string start = "{scheduler: {type: 'WarmupLR', params: {last_batch_iteration: ";
  EXPECT_EQ(parse_text(start + "5}}}").scheduler.last_batch_iteration, 5);
  EXPECT_TRUE(unsupported_features(parse_text(start + "5}}}")).empty());
  EXPECT_THAT(refusal_of(start + "-2}}}"), HasSubstr("last_batch_iteration"));
}

}  // namespace
}  // namespace ds::engine::config
