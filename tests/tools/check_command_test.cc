// ds-tool check.
#include "tools/check_command.h"

#include <gmock/gmock.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "config/plan/device_overhead.h"
#include "tests/config/scratch_file.h"
#include "tests/tools/command_outcome.h"

namespace ds::tool {
namespace {

using engine::config::ScratchFile;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Outcome run(const CheckOptions& options) {
  return outcome_of([&](auto& out, auto& err) { return check(options, out, err); });
}

constexpr const char* kGood = R"({
  "train_batch_size": 8, "my_notes": "x",
  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
  "zero_optimization": {"stage": 2}
})";

TEST(CheckCommand, PrintsValuesChoicesWarningsPlanAndBytes) {
  const ScratchFile file(kGood);
  const Outcome outcome = run({.config = file.path(), .world_size = 2, .parameters = 1000});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("fine for 2 ranks"), HasSubstr("train_micro_batch_size_per_gpu  4 (derived)"),
                    HasSubstr("optimizer.params.lr  5e-05 assumed; --auto optimizer.params.lr=VALUE"),
                    HasSubstr("my_notes (line 2): unknown key"), HasSubstr("reduce-scatter in every micro-batch"),
                    HasSubstr("optimizer states"), HasSubstr("sent in a step")));
}

TEST(CheckCommand, PrintsOneJsonObject) {
  const ScratchFile file(kGood);
  const Outcome outcome = run({.config = file.path(), .world_size = 2, .parameters = 1'000'000, .json = true});
  ASSERT_EQ(outcome.code, 0);
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["ok"], true);
  EXPECT_EQ(report["world_size"], 2);
  EXPECT_EQ(report["config"]["train_micro_batch_size_per_gpu"], 4);
  EXPECT_EQ(report["config"]["zero_optimization"]["reduce_bucket_size"], 500'000'000);
  EXPECT_EQ(report["auto"][0]["path"], "optimizer.params.lr");
  EXPECT_EQ(report["warnings"].size(), 1U);
  EXPECT_FALSE(report["plan"].empty());
  // Adam in float32 on two ranks: half of 8 bytes an element.
  EXPECT_NEAR(report["bytes_per_rank"]["optimizer"].get<double>(), 4e6, 1e4);
  EXPECT_NEAR(report["bytes_per_rank"]["sent_per_step"].get<double>(), 4e6, 1e4);
  EXPECT_EQ(report["bytes_per_rank"]["gradient_compression"], 0);
}

constexpr const char* kLeftToTheTrainer = R"({
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2}
})";

TEST(CheckCommand, AssumesWhatNobodyGivesAndSaysSo) {
  const ScratchFile file(kLeftToTheTrainer);
  const Outcome outcome = run({.config = file.path(), .world_size = 4, .auto_values = {"train_batch_size=64"}});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("64 from the program"), HasSubstr("16 from the other batch sizes"),
                                 HasSubstr("5e-05 assumed; --auto optimizer.params.lr=VALUE")));
  // Even without a batch size.
  const ScratchFile bare(R"({"zero_optimization": {"stage": 2}})");
  EXPECT_THAT(run({.config = bare.path(), .world_size = 4}).out,
              HasSubstr("8 assumed; --auto train_micro_batch_size_per_gpu=VALUE"));
}

TEST(CheckCommand, RefusesAutoValuesThatChangeNothing) {
  const ScratchFile file(kLeftToTheTrainer);
  const auto refusal = [&](const char* assignment) {
    const Outcome outcome = run({.config = file.path(), .auto_values = {assignment}});
    EXPECT_EQ(outcome.code, 2) << assignment;
    return outcome.err;
  };
  EXPECT_THAT(refusal("eps=1e-6"), HasSubstr("--auto optimizer.params.eps: expected \"auto\" there"));
  EXPECT_THAT(refusal("lr"), HasSubstr("--auto lr: expected KEY=VALUE"));
  EXPECT_THAT(refusal("lr=fast"), HasSubstr("--auto lr: expected a number, found fast"));
}

TEST(CheckCommand, ExplainsTheKeysOfTheFile) {
  const ScratchFile file(R"({"train_batch_size": 8, "my_notes": "x", "zero_optimization": {"stage": 2},
                             "wandb": {"enabled": false}})");
  const Outcome outcome = run({.config = file.path(), .explain = true});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(
      outcome.out,
      AllOf(HasSubstr("zero_optimization.stage\n      what is divided among the ranks"), HasSubstr("Without it: 0."),
            HasSubstr("my_notes\n      No key of a ds_config: ignored."), HasSubstr("A part of wandb, which has no")));
  const auto report = nlohmann::json::parse(run({.config = file.path(), .explain = true, .json = true}).out);
  EXPECT_THAT(report["explained"]["train_batch_size"].get<std::string>(), HasSubstr("over all ranks"));
}

constexpr const char* kPipeline = R"({
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
  "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}, "pipeline": {"stages": 4, "schedule": "zb_h1"}
})";

TEST(CheckCommand, RanksOfAPipelineShareTheModel) {
  const ScratchFile file(kPipeline);
  const Outcome outcome = run({.config = file.path(), .world_size = 8, .parameters = 4'000'001});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("8 (pipeline 4 x data parallel 2)"), HasSubstr("32 = 2 per rank x 8"),
                                 HasSubstr("4 ranks, zb_h1, 8 micro-batches"),
                                 HasSubstr("Bytes per rank, for 1000001 elements, 1/4 of the model")));
}

TEST(CheckCommand, PipelinesInJson) {
  const ScratchFile file(kPipeline);
  const Outcome outcome = run({.config = file.path(), .world_size = 8, .parameters = 4'000'000, .json = true});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["world_size"], 8);
  EXPECT_EQ(report["config"]["train_batch_size"], 32);
  EXPECT_EQ(report["bytes_per_rank"]["elements"], 1'000'000);
  // 8 bytes an element of a quarter of the model, on two ranks.
  EXPECT_NEAR(report["bytes_per_rank"]["optimizer"].get<double>(), 4e6, 1e4);
  const nlohmann::json& beside = report["bytes_per_rank"]["beside_on_a_gpu"];
  EXPECT_EQ(beside["nccl"], 3 * engine::kNcclGroupBytes + 4 * engine::kNcclPairBytes);
  EXPECT_EQ(beside["context"], engine::kCudaContextBytes);
  EXPECT_THAT(run({.config = file.path(), .world_size = 8, .parameters = 4'000'000}).out,
              HasSubstr("on a GPU, beside: NCCL, 3 groups"));
}

TEST(CheckCommand, PipelinesNeedRanks) {
  const ScratchFile file(kPipeline);
  const Outcome outcome = run({.config = file.path(), .world_size = 6});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("pipeline.stages"), HasSubstr("a divisor of the 6 ranks, found 4")));
}

TEST(CheckCommand, OneRankIsNoRanks) {
  const ScratchFile file(kPipeline);
  EXPECT_THAT(run({.config = file.path(), .world_size = 1}).err, HasSubstr("a divisor of the 1 rank, found 4"));
  const ScratchFile tensor(R"({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4}})");
  EXPECT_THAT(run({.config = tensor.path(), .world_size = 1}).err, HasSubstr("a divisor of the 1 rank, found 4"));
}

constexpr const char* kThreeAxes = R"({
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW"},
  "pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}
})";

TEST(CheckCommand, PipelinesWithATensorAxis) {
  const ScratchFile file(kThreeAxes);
  const Outcome outcome = run({.config = file.path(), .world_size = 8, .parameters = 4'000'000, .ranks_per_node = 4});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("8 (pipeline 2 x data parallel 2 x tensor 2)"),
                                 HasSubstr("pipe 2 x data 2 x tensor 2, the last innermost: ranks 0 and 4 are"),
                                 HasSubstr("16 = 2 per rank x 4 accumulation x 2 data-parallel ranks"),
                                 HasSubstr("each axis lies inside a host"), HasSubstr("1/4 of the model"),
                                 Not(HasSubstr("Warnings"))));
}

TEST(CheckCommand, NamesTheRanksBetweenWhichATensorAxisLeavesAHost) {
  const ScratchFile file(kThreeAxes);
  const Outcome outcome = run({.config = file.path(), .world_size = 8, .ranks_per_node = 3, .json = true});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json warnings = nlohmann::json::parse(outcome.out)["warnings"];
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0].get<std::string>(),
              AllOf(HasSubstr("autotp_size: 2"), HasSubstr("ranks 2 (node 0) and 3 (node 1)")));
}

TEST(CheckCommand, AxesHaveToMultiplyToTheRanks) {
  const auto refusal = [](const std::string& text, int64_t ranks) {
    const ScratchFile file(text);
    const Outcome outcome = run({.config = file.path(), .world_size = ranks});
    EXPECT_EQ(outcome.code, 2) << ranks;
    return outcome.err;
  };
  EXPECT_THAT(refusal(kThreeAxes, 6),
              HasSubstr("a divisor of the 3 ranks of a stage, found 2; start a multiple of 4 ranks (pipeline"));
  EXPECT_THAT(refusal(kThreeAxes, 5), HasSubstr("a divisor of the 5 ranks, found 2; start a multiple of 4 ranks"));
  std::string with_size = kThreeAxes;
  with_size.insert(1, "\"data_parallel_size\": 4, ");
  EXPECT_THAT(refusal(with_size, 8), HasSubstr("expected 2, the ranks that run, found 4; remove the key or start 16"));
  with_size.replace(with_size.find(": 4,"), 4, ": 9223372036854775807,");
  EXPECT_THAT(refusal(with_size, 8),
              HasSubstr("found 9223372036854775807; remove the key or start 36893488147419103232"));
}

// What only the plan finds out begins with the file too.
TEST(CheckCommand, NamesTheFileOfWhatThePlanRefuses) {
  const ScratchFile file(R"({"train_batch_size": 8, "optimizer": {"type": "ZeroOneAdam"},
                             "zero_optimization": {"stage": 1}})");
  const Outcome outcome = run({.config = file.path()});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, AllOf(::testing::StartsWith(file.path()),
                                 HasSubstr(": optimizer.type: ZeroOneAdam needs zero_optimization.stage 0")));
}

constexpr const char* kElastic = R"({
  "elasticity": {"enabled": true, "max_train_batch_size": 50, "micro_batch_sizes": [2, 3], "version": 0.1},
  "optimizer": {"type": "AdamW"}, "pipeline": {"stages": 2}
})";

TEST(CheckCommand, ShowsValidWorldSizes) {
  const ScratchFile file(kElastic);
  EXPECT_THAT(run({.config = file.path(), .world_size = 4}).out,
              AllOf(HasSubstr("train_batch_size                 48 (derived)"),
                    HasSubstr("a batch of 48 on 2, 4, 6, 8, 12, 16, 24, 32, 48 ranks")));
  const nlohmann::json report = nlohmann::json::parse(run({.config = file.path(), .world_size = 4, .json = true}).out);
  EXPECT_EQ(report["elasticity"]["valid_world_sizes"].size(), 9U);
  const Outcome refused = run({.config = file.path(), .world_size = 10});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("nearest valid: 4 or 6"));
}

TEST(CheckCommand, AllMistakesGoToTheErrorStream) {
  const ScratchFile file("{\n\"train_batch_size\": 3,\n\"fp16\": {\"enabled\": 7},\n\"gradient_clipp1ng\": 1\n}");
  const Outcome outcome = run({.config = file.path(), .world_size = 2});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("3 mistakes"), HasSubstr("train_batch_size (line 2)"),
                                 HasSubstr("fp16.enabled (line 3)"), HasSubstr("did you mean gradient_clipping?")));
}

TEST(CheckCommand, RefusesWhatThisVersionLacks) {
  const ScratchFile file(R"({"train_batch_size": 2, "zero_optimization": {"zeropp_loco_param": {}}})");
  const Outcome outcome = run({.config = file.path(), .world_size = 2, .json = true});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("zero_optimization.zeropp_loco_param"));
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["ok"], false);
}

TEST(CheckCommand, StrictRefusesUnknownKeys) {
  const ScratchFile file(kGood);
  EXPECT_EQ(run({.config = file.path(), .world_size = 2, .strict = true}).code, 2);
}

// Looking for near misses among all pairs took minutes.
TEST(CheckCommand, AHundredThousandUnknownKeysTakeSeconds) {
  std::string text = "{\"train_batch_size\": 1";
  for (int i = 0; i < 100'000; ++i) text += ",\n\"notes" + std::to_string(i) + "\": 1";
  const ScratchFile file(text + ",\n\"" + std::string(1 << 20, 'k') + "\": 1}");
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome = run({.config = file.path()});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, HasSubstr("and 99901 more warnings"));
  EXPECT_LT(outcome.out.size(), 20'000U);
}

TEST(CheckCommand, PrintsNoRawBytes) {
  const ScratchFile file("{\"train_batch_size\": 1, \"note\x7f\": 1, \"monitor_config\": \"a\xC2\x9B\"}");
  const Outcome outcome = run({.config = file.path()});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("note\\x7F"), Not(HasSubstr("\x7f")), Not(HasSubstr("\xC2\x9B"))));
}

TEST(CheckCommand, BucketsWithoutNumberAreRefused) {
  const ScratchFile file(
      "{\"train_batch_size\": 1, \"optimizer\": {\"type\": \"AdamW\"}, \"zero_optimization\": {\"stage\": 2, "
      "\"reduce_bucket_size\": 1}}");
  const Outcome outcome = run({.config = file.path(), .parameters = int64_t{1} << 50});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("buckets; raise zero_optimization.reduce_bucket_size"));
}

TEST(CheckCommand, AMissingFileIsNamed) {
  const Outcome outcome = run({.config = "no/such/file.json"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("no/such/file.json"));
}

}  // namespace
}  // namespace ds::tool
