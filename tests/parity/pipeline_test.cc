// Pipelines as a user runs them: the GPT under ds-launch, stages as processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <string>

#include "tests/parity/gpt_job.h"

namespace ds::test {
namespace {

using testing::HasSubstr;

constexpr int kSteps = 12;

nlohmann::json config_of(int zero_stage, int micro_batches) { return reference_config(zero_stage, 2, micro_batches); }

GptJob pipeline(int stages, int data_ranks, const std::string& schedule, int zero_stage, bool tied) {
  GptJob job{.config = config_of(zero_stage, 4 / data_ranks), .ranks = stages * data_ranks, .steps = kSteps};
  job.arguments = {"--pipeline_stages", std::to_string(stages), "--pipeline_schedule", schedule};
  if (tied) job.arguments.emplace_back("--tie_embeddings");
  return job;
}

void expect_near(const GptResult& found, const GptResult& wanted) {
  const std::vector<double> a = losses_of(found);
  const std::vector<double> b = losses_of(wanted);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < b.size(); i += 2) {  // loss, norm
    EXPECT_NEAR(a[i], b[i], 5e-6) << "step " << i / 2;
    EXPECT_NEAR(a[i + 1], b[i + 1], 2e-5 * b[i + 1]) << "step " << i / 2;
  }
}

TEST(GptPipeline, TrainsAsOneProcess) {
  for (const bool tied : {false, true}) {
    GptJob alone{.config = config_of(0, 4), .steps = kSteps};
    if (tied) alone.arguments = {"--tie_embeddings"};
    const GptResult wanted = run_gpt(alone);
    expect_near(run_gpt(pipeline(2, 1, "1f1b", 1, tied)), wanted);
    expect_near(run_gpt(pipeline(2, 2, "zb_h1", 2, tied)), wanted);
    expect_near(run_gpt(pipeline(3, 1, "zbv", 0, tied)), wanted);
    expect_near(run_gpt(pipeline(4, 1, "interleaved", 3, tied)), wanted);  // 8 stages of 8 layers
  }
}

TEST(GptPipeline, CheckpointsGoOnAsOneModuleAndBack) {
  const ScratchFolder folder;
  const auto save = std::vector<std::string>{"--save_checkpoint", folder.path().string()};
  const auto load = std::vector<std::string>{"--load_checkpoint", folder.path().string()};
  GptJob first = pipeline(2, 1, "1f1b", 1, true);
  first.steps = 5;
  first.arguments.insert(first.arguments.end(), save.begin(), save.end());
  run_gpt(first);
  GptJob alone{.config = config_of(0, 4), .steps = 10, .arguments = {"--tie_embeddings"}};
  const GptResult wanted = run_gpt(alone);
  const auto expect_last_steps = [&](GptJob job) {
    job.steps = 10;
    job.arguments.insert(job.arguments.end(), load.begin(), load.end());
    const GptResult found = try_gpt(job);
    ASSERT_EQ(found.exit_code, 0) << found.output;
    ASSERT_EQ(found.steps.size(), 5U);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(found.steps[i]["loss"].get<double>(), wanted.steps[5 + i]["loss"].get<double>(), 5e-6);
    }
  };
  expect_last_steps(alone);
  expect_last_steps(pipeline(2, 2, "zbv", 3, true));
}

// With its defaults the example ends with a sample of text, for which it reads scores that may be split.
TEST(GptAxes, EndsWithASampleOnEachAxis) {
  const ScratchFolder folder;
  const auto expect_sample = [&](const nlohmann::json& changes, const std::string& arguments, int ranks = 2) {
    nlohmann::json config = reference_config(0, 1, 1);
    config.update(changes);
    const std::string path = folder.path() / "config.json";
    std::ofstream(path) << config;
    const auto [exit_code, output] = launch("--num_procs " + std::to_string(ranks) + " " DS_GPT " --deepspeed_config " +
                                            path + " --steps 2 --layers 2 --hidden 32 " + arguments);
    EXPECT_EQ(exit_code, 0) << changes << arguments << "\n" << output;
    EXPECT_THAT(output, HasSubstr("--- a sample of what it learned ---")) << changes << arguments;
  };
  expect_sample(nlohmann::json::object(), "");
  expect_sample({{"zero_optimization", {{"stage", 3}}}}, "");
  expect_sample({{"tensor_parallel", {{"autotp_size", 2}}}}, "");
  expect_sample({{"tensor_parallel", {{"autotp_size", 2}, {"sequence_parallel", true}}}}, "--tie_embeddings");
  expect_sample({{"sequence_parallel_size", 2}}, "");
  expect_sample(nlohmann::json::object(), "--pipeline_stages 2");
  // The file alone says that the model is a pipeline.
  nlohmann::json both = {{"pipeline", {{"stages", 2}}}, {"gradient_accumulation_steps", 2}};
  expect_sample(both, "");
  both["tensor_parallel"] = {{"autotp_size", 2}};
  expect_sample(both, "", 4);
  expect_sample(both, "--tie_embeddings", 4);
}

// Two ranks share each batch. Its loss, which the metrics show, is that of whole sequences.
TEST(GptAxes, SequencesOverRanksTrainAsOneProcess) {
  GptJob cut{.config = config_of(2, 4), .ranks = 2, .steps = kSteps};
  cut.config["sequence_parallel_size"] = 2;
  cut.config["sequence_parallel"] = {{"attention", "ring"}, {"order", "zigzag"}};
  expect_near(run_gpt(cut), run_gpt({.config = config_of(0, 4), .steps = kSteps}));
}

TEST(GptAxes, WhatWantsAllWeightsIsRefusedOnAPipelineOfTheFileToo) {
  nlohmann::json config = config_of(1, 2);
  config["pipeline"] = {{"stages", 2}};
  const GptResult run = try_gpt({.config = config, .ranks = 2, .arguments = {"--save", "weights.safetensors"}});
  EXPECT_NE(run.exit_code, 0);
  EXPECT_THAT(run.output, HasSubstr("want all weights on one rank, but pipeline.stages"));
}

TEST(GptPipeline, AStageThatIsKilledIsNamedAndTheOthersEnd) {
  GptJob job = pipeline(3, 1, "zb_h1", 1, false);
  job.steps = 1000000;
  job.during = [](const auto& metrics) { kill(process_of_rank(metrics, 1), SIGKILL); };
  const auto begin = std::chrono::steady_clock::now();
  const GptResult run = try_gpt(job);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "a failure must not hang";
  EXPECT_EQ(run.exit_code, 128 + SIGKILL) << run.output;
  EXPECT_THAT(run.output, HasSubstr("rank 1"));
}

TEST(GptPipeline, WhatNeedsAllWeightsOnOneRankIsRefused) {
  GptJob job = pipeline(2, 1, "1f1b", 1, false);
  job.arguments.insert(job.arguments.end(), {"--save", "weights.safetensors"});
  const GptResult run = try_gpt(job);
  EXPECT_NE(run.exit_code, 0);
  EXPECT_THAT(run.output, HasSubstr("--pipeline_stages"));
}

}  // namespace
}  // namespace ds::test
