// Unknown keys, and all mistakes at once.
#include <gmock/gmock.h>

#include <regex>

#include "config/parse_steps.h"
#include "config/supported.h"
#include "tests/config/parse_text.h"
#include "tests/config/scratch_file.h"

namespace ds::engine::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(UnknownKeys, ANearMissIsAnErrorWithItsLine) {
  const ScratchFile file("{\n  \"train_batch_size\": 1,\n  \"gradient_clipp1ng\": 1.0\n}");
  try {
    parse(file.path());
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("gradient_clipp1ng (line 3): unknown key; did you mean gradient_clipping?"));
  }
}

TEST(UnknownKeys, OthersAreWarnedAboutWithTheirPath) {
  EXPECT_EQ(warnings_of("{my_own_notes: 1}"), "my_own_notes: unknown key, ignored\n");
  EXPECT_EQ(warnings_of("{flops_profiler: {warm_up: 1}}"), "flops_profiler.warm_up: unknown key, ignored\n");
  EXPECT_EQ(warnings_of("{'pipe-parallel-size': 1, 'num-layers': 2}"),
            "pipe-parallel-size: unknown key, ignored\nnum-layers: unknown key, ignored\n");
}

TEST(UnknownKeys, CheckedSectionsRefuseThem) {
  for (const char* section : {"zero_optimization", "fp16", "bf16", "comms_logger", "tensorboard", "csv_monitor",
                              "wandb", "comet", "hybrid_engine", "compile", "tensor_parallel"}) {
    EXPECT_THAT(refusal_of(std::string("{") + section + ": {something_else: 1}}"),
                HasSubstr(std::string("unknown key in ") + section))
        << section;
  }
}

TEST(UnknownKeys, StrictMakesAllOfThemErrors) {
  EXPECT_THAT(refusal_of("{my_own_notes: 1}", {.strict = true}), HasSubstr("my_own_notes: unknown key"));
  EXPECT_THAT(refusal_of("{strict: true, my_own_notes: 1}"), HasSubstr("my_own_notes: unknown key"));
  EXPECT_THAT(refusal_of("{strict: true, reduce_scatter: true}"), HasSubstr("belongs into \"zero_optimization\""));
  EXPECT_TRUE(parse_text("{strict: true}").strict);
}

TEST(UnknownKeys, AKeyOfASectionAtTheTopIsTold) {
  EXPECT_EQ(warnings_of("{reduce_bucket_size: 5e8}"),
            "reduce_bucket_size: has no effect here; it belongs into \"zero_optimization\"\n");
  EXPECT_EQ(warnings_of("{lr: 1}"), "lr: has no effect here; it belongs into \"optimizer.params\"\n");
}

TEST(UnknownKeys, HabitsOfOtherTrainersAreTold) {
  const auto hint = [](const std::string& key, const std::string& text) {
    EXPECT_THAT(warnings_of("{" + key + ": 1}"), HasSubstr(key + ": unknown key, ignored; " + text)) << key;
  };
  hint("batch_size", "did you mean train_batch_size?");
  hint("learning_rate", "did you mean optimizer.params.lr?");
  hint("zero_stage", "did you mean zero_optimization.stage?");
  hint("mixed_precision", "use \"bf16\": {\"enabled\": true} or \"fp16\": {\"enabled\": true}");
  hint("gradient_accumulation", "did you mean gradient_accumulation_steps?");
  hint("per_device_train_batch_size", "did you mean train_micro_batch_size_per_gpu?");
  hint("max_grad_norm", "did you mean gradient_clipping?");
  hint("warmup_steps", "did you mean scheduler.params.warmup_num_steps?");
  hint("zero3_save_16bit_model", "did you mean zero_optimization.stage3_gather_16bit_weights_on_model_save?");
  hint("comms_config", "did you mean comms_logger?");
  hint("monitor_config", "use tensorboard, csv_monitor");
  hint("Epochs", "no key of a ds_config");
  EXPECT_THAT(refusal_of("{zero_optimization: {offload: 'cpu'}}"),
              HasSubstr("zero_optimization.offload: unknown key in zero_optimization; did you mean "
                        "zero_optimization.offload_optimizer?"));
  EXPECT_THAT(refusal_of("{optimizer: {type: 'AdamW', params: {learning_rate: 1}}}"),
              HasSubstr("did you mean optimizer.params.lr?"));
  EXPECT_THAT(warnings_of("{optimizer: {type: 'AdamW', lr: 1}}"), HasSubstr("did you mean optimizer.params.lr?"));
  EXPECT_THAT(warnings_of("{optimizer: {type: 'AdamW', adam_w_mode: true}}"),
              HasSubstr("did you mean optimizer.params.adam_w_mode?"));
  EXPECT_THAT(warnings_of("{pipeline: {partition_method: 'uniform'}}"), HasSubstr("did you mean pipeline.partition?"));
}

// A hint that leads to a key that there is not would be worse than none.
TEST(UnknownKeys, HintsLeadToKeysThatExist) {
  const std::vector<std::string> known = known_keys();
  const std::vector<std::string> habits = habitual_keys();
  EXPECT_GT(habits.size(), 100U);
  for (const std::string& habit : habits) {
    const std::string meaning = meaning_of_key("/" + std::regex_replace(habit, std::regex("\\."), "/"));
    const std::string start = "did you mean ";
    if (!meaning.starts_with(start)) continue;
    const std::string path = meaning.substr(start.size(), meaning.size() - start.size() - 1);
    EXPECT_THAT(known, ::testing::Contains(path)) << habit;
  }
}

TEST(UnknownKeys, AValueInPlaceOfASectionIsTold) {
  EXPECT_THAT(refusal_of("{fp16: true}"), HasSubstr("fp16: expected an object {...}, as in {\"enabled\": true}"));
  EXPECT_THAT(refusal_of("{optimizer: 'AdamW'}"), HasSubstr("as in {\"type\": \"AdamW\"}, found \"AdamW\""));
  EXPECT_THAT(refusal_of("{activation_checkpointing: true}"), HasSubstr("expected an object {...}, found true"));
}

TEST(UnknownKeys, ManyAreCountedNotListed) {
  std::string text = "{strict: true";
  for (int i = 0; i < 1000; ++i) text += ", notes" + std::to_string(i) + ": 1";
  EXPECT_THAT(refusal_of(text + "}"), AllOf(HasSubstr("1000 mistakes"), HasSubstr("and 900 more mistakes")));
}

TEST(Mistakes, AreReportedTogether) {
  const std::string text = refusal_of(
      "{train_batch_size: -1, fp16: {enabled: 'maybe', hystersis: 2}, zero_optimization: {stage: 7}, "
      "optimizer: {type: 'Adam', params: {lr: 'fast'}}}");
  EXPECT_THAT(text, AllOf(HasSubstr("JSON object: 5 mistakes"), HasSubstr("train_batch_size: expected an integer > 0"),
                          HasSubstr("fp16.enabled: expected true or false, found \"maybe\""),
                          HasSubstr("fp16.hystersis: unknown key; did you mean hysteresis?"),
                          HasSubstr("zero_optimization.stage: expected"),
                          HasSubstr("optimizer.params.lr: expected a number >= 0, found \"fast\"")));
}

TEST(Mistakes, AWrongBatchSizeBringsNoOthers) {
  EXPECT_THAT(refusal_of("{train_batch_size: 'many'}"), AllOf(HasSubstr("1 mistake"), Not(HasSubstr("neither"))));
}

TEST(Mistakes, ABadRankCountIsTheCallersFault) { EXPECT_THROW(parse_text("{}", {.dp_world_size = 0}), UsageError); }

}  // namespace
}  // namespace ds::engine::config
