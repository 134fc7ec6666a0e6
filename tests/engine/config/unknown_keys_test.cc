// Unknown keys, and all mistakes at once.
#include <gmock/gmock.h>

#include "tests/engine/config/parse_text.h"
#include "tests/engine/config/scratch_file.h"

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
