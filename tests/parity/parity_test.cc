// The GPT example against plain torch (tests/parity/torch_curve.h): the same weights, batches and optimizer, step by
// step. Jobs of one curve are one case, so that it is computed once.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "tests/parity/expect_curve.h"
#include "tests/parity/gpt_job.h"
#include "tests/support/grid.h"

namespace ds::test {
namespace {

// The steps of jobs of which no bit may differ. The order of parameters is recorded in the first step, and what a sum
// in another order changes is in all values by the next one.
int steps_without_a_difference() { return whole_grid_wanted() ? 12 : 6; }

// 32 jobs. The sample of 16 has every stage on every number of ranks, and with and without accumulation.
std::vector<std::tuple<int, int, int>> jobs() {
  return grid_sample(2, std::vector<int>{1, 2}, std::vector<int>{1, 2, 3, 4}, std::vector<int>{0, 1, 2, 3});
}

// By the sequences of a step.
class ParityTest : public testing::TestWithParam<int> {};

TEST_P(ParityTest, Float32AgreesWithTorch) {
  const int global_batch = GetParam();
  int run = 0;
  for (const auto& [accumulation, ranks, stage] : jobs()) {
    if (accumulation * ranks != global_batch) continue;
    SCOPED_TRACE("stage " + std::to_string(stage) + ", accumulation " + std::to_string(accumulation) + ", ranks " +
                 std::to_string(ranks));
    const int steps = global_batch == 2 ? 50 : compared_steps();
    expect_curve({.config = reference_config(stage, 1, accumulation), .ranks = ranks, .steps = steps},
                 {.global_batch = global_batch});
    ++run;
  }
  EXPECT_GT(run, 0);
}

INSTANTIATE_TEST_SUITE_P(Grid, ParityTest, testing::Values(1, 2, 3, 4, 6, 8),
                         [](const auto& variant) { return "Batch" + std::to_string(variant.param); });

TEST(Parity, TheFixtureJobOfSixteenSequences) {
  expect_curve({.config = reference_config(2, 4, 2), .ranks = 2, .steps = compared_steps()}, {.global_batch = 16});
}

TEST(Parity, TiedEmbeddings) {
  for (int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    expect_curve({.config = reference_config(stage, 1, 1), .ranks = 2, .arguments = {"--tie_embeddings"}},
                 {.global_batch = 2, .tied = true});
  }
}

TEST(Parity, FrozenEmbeddings) {
  for (int stage : {0, 3}) {
    for (bool tied : {false, true}) {
      SCOPED_TRACE("stage " + std::to_string(stage) + (tied ? ", tied" : ", untied"));
      GptJob job{.config = reference_config(stage, 1, 2),
                 .ranks = 2,
                 .steps = compared_steps(),
                 .arguments = {"--freeze_embeddings"}};
      if (tied) job.arguments.push_back("--tie_embeddings");
      expect_curve(job, {.global_batch = 4, .tied = tied, .frozen = true});
    }
  }
  // The input of the first block requires no gradient.
  expect_curve({.config = reference_config(3, 1, 2),
                .ranks = 2,
                .steps = compared_steps(),
                .arguments = {"--freeze_embeddings"},
                .activation_checkpointing = true},
               {.global_batch = 4, .frozen = true});
}

// Nothing but the config says what is split. Tied vocabularies over two ranks differ in one steep step's norm by 2.4e-5
// from rounding alone: in float64 they are the same (TensorParallelEngine.TiedModelsInFloat64AreTheSame).
TEST(Parity, LayersOverATensorAxis) {
  const std::tuple<int, int, int, bool> jobs[] = {
      {2, 2, 0, false}, {2, 4, 2, false}, {2, 4, 3, false}, {4, 4, 1, true}};
  for (const auto& [tensor, ranks, stage, tied] : jobs) {
    SCOPED_TRACE("tensor " + std::to_string(tensor) + ", ranks " + std::to_string(ranks) + ", stage " +
                 std::to_string(stage));
    nlohmann::json config = reference_config(stage, 2 * tensor / ranks, 1);
    config["tensor_parallel"] = {{"autotp_size", tensor}};
    GptJob job{.config = config, .ranks = ranks, .steps = compared_steps()};
    if (tied) job.arguments.push_back("--tie_embeddings");
    expect_curve(job, {.global_batch = 2, .tied = tied});
  }
}

// The config alone says that the model is a pipeline, and what is split. All grids together: the whole curve, and three
// axes of two ranks.
TEST(Parity, StagesWithLayersOverATensorAxis) {
  const bool whole = whole_grid_wanted();
  const auto expect_axes = [&](int data, const char* schedule, int stage) {
    SCOPED_TRACE(std::string(schedule) + ", data " + std::to_string(data) + ", stage " + std::to_string(stage));
    nlohmann::json config = reference_config(stage, 1, 4 / data);
    config["tensor_parallel"] = {{"autotp_size", 2}};
    config["pipeline"] = {{"stages", 2}, {"schedule", schedule}};
    expect_curve({.config = config, .ranks = 4 * data, .steps = whole ? 50 : 6}, {.global_batch = 4});
  };
  expect_axes(1, "1f1b", 1);
  if (!whole) return;
  expect_axes(1, "zbv", 3);
  expect_axes(2, "1f1b", 1);
  expect_axes(2, "zb_h1", 2);
}

TEST(Parity, TwoGroupsOfTwoRanks) {
  const std::pair<const char*, int> jobs[] = {
      {"mics_shard_size", 1}, {"mics_shard_size", 2}, {"mics_shard_size", 3}, {"zero_hpz_partition_size", 3}};
  for (const auto& [key, stage] : jobs) {
    SCOPED_TRACE(std::string(key) + ", stage " + std::to_string(stage));
    nlohmann::json config = reference_config(stage, 1, 1);
    config["zero_optimization"][key] = 2;
    expect_curve({.config = config, .ranks = 4, .steps = compared_steps()}, {.global_batch = 4});
  }
}

TEST(Parity, Bfloat16StaysWithinItsRounding) {
  for (int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    nlohmann::json config = reference_config(stage, 1, 2);
    config["bf16"] = {{"enabled", true}};
    expect_curve({.config = config, .ranks = 2, .steps = whole_grid_wanted() && stage == 2 ? 50 : 12},
                 {.global_batch = 4, .precision = "bf16"});
  }
}

TEST(Parity, OverlapAndBucketSizeChangeNoBitOnTwoRanks) {
  const int steps = steps_without_a_difference();
  for (int stage : {0, 1, 2, 3}) {
    nlohmann::json config = reference_config(stage, 1, 1);
    const std::vector<double> base = losses_of(run_gpt({.config = config, .ranks = 2, .steps = steps}));
    config["zero_optimization"]["overlap_comm"] = false;
    EXPECT_EQ(losses_of(run_gpt({.config = config, .ranks = 2, .steps = steps})), base)
        << "overlap off, stage " << stage;
    config["zero_optimization"]["overlap_comm"] = true;
    for (int64_t bucket : {int64_t{1}, int64_t{100000}}) {
      config["zero_optimization"]["reduce_bucket_size"] = bucket;
      EXPECT_EQ(losses_of(run_gpt({.config = config, .ranks = 2, .steps = steps})), base)
          << "reduce_bucket_size " << bucket << ", stage " << stage;
    }
  }
}

TEST(Parity, StagesOneAndTwoSendWhatThePaperSays) {
  for (int stage : {1, 2}) {
    for (int ranks : {2, 4}) {
      const int steps = 4;
      const GptResult run = run_gpt({.config = reference_config(stage, 1, 1), .ranks = ranks, .steps = steps});
      const double parameters = run.summary["parameters"];
      // Reduce-scatter and all-gather: 2 Psi (N-1)/N elements of 4 bytes, and padding of less than 1 %.
      const double wanted = 2.0 * parameters * (ranks - 1) / ranks * 4.0 * steps;
      for (const nlohmann::json& bytes : run.summary["comm_bytes_sent"]) {
        EXPECT_GE(bytes.get<double>(), wanted);
        EXPECT_LE(bytes.get<double>(), wanted * 1.01) << "stage " << stage << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(Parity, StageThreeSendsWhatThePaperSays) {
  const int steps = 4;
  for (int ranks : {2, 4}) {
    const GptResult run = run_gpt({.config = reference_config(3, 1, 2), .ranks = ranks, .steps = steps});
    const double parameters = run.summary["parameters"];
    // Every micro-batch gathers for forward and for backward, and reduces: 3 Psi (N-1)/N. The two buckets at the turn
    // are used again at once, and stay.
    const double wanted = 3.0 * parameters * (ranks - 1) / ranks * 4.0 * 2 * steps;
    for (const nlohmann::json& bytes : run.summary["comm_bytes_sent"]) {
      EXPECT_GE(bytes.get<double>(), wanted * 0.85) << ranks << " ranks";
      EXPECT_LE(bytes.get<double>(), wanted * 1.01) << ranks << " ranks";
    }
  }
}

TEST(Parity, PrefetchChangesNoBit) {
  const int steps = steps_without_a_difference();
  nlohmann::json config = reference_config(3, 1, 2);
  const std::vector<double> base = losses_of(run_gpt({.config = config, .ranks = 2, .steps = steps}));
  config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0;
  EXPECT_EQ(losses_of(run_gpt({.config = config, .ranks = 2, .steps = steps})), base);
}

TEST(Parity, ActivationCheckpointingChangesNoBit) {
  const std::pair<int, bool> jobs[] = {{0, false}, {2, false}, {3, false}, {3, true}};
  for (const auto& [stage, tied] : jobs) {
    SCOPED_TRACE("stage " + std::to_string(stage) + (tied ? ", tied" : ", untied"));
    GptJob job{.config = reference_config(stage, 1, 2),
               .ranks = 2,
               .steps = compared_steps(),
               .activation_checkpointing = true};
    if (tied) job.arguments = {"--tie_embeddings"};
    GptResult checkpointed = expect_curve(job, {.global_batch = 4, .tied = tied});
    job.activation_checkpointing = false;
    job.steps = 12;
    checkpointed.steps.resize(12);
    EXPECT_EQ(losses_of(checkpointed), losses_of(run_gpt(job)));
  }
}

TEST(Parity, InitialWeightsFromAFileAreTheSameWeights) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("ds_init_" + std::to_string(getpid()) + ".safetensors")).string();
  run_gpt({.config = reference_config(0, 1, 1), .ranks = 1, .steps = 0, .arguments = {"--save", file}});
  expect_curve({.config = reference_config(2, 1, 1),
                .ranks = 2,
                .steps = compared_steps(),
                .arguments = {"--init", file, "--seed", "99"}},
               {.global_batch = 2});
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace ds::test
