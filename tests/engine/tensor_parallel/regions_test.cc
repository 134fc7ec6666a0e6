// Checkpointed regions over a tensor axis: what they keep between forward and backward, and that training stays that of
// plain torch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "dsengine/activation_checkpoint.h"
#include "engine/plan/plan.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Every block is a region, whose input is the hidden states.
GptRun with_regions(GptRun run, const nlohmann::json& section) {
  run.model.activation_checkpointing = true;
  run.more["activation_checkpointing"] = section;
  run.more["activation_checkpointing"]["profile"] = true;
  run.more["steps_per_print"] = 1000;  // which would take the statistics
  return run;
}

int64_t hidden_bytes(const GptRun& run) { return 2 * run.model.seq_len * run.model.hidden * 4; }

// Trains as plain torch, and keeps `bytes` of each input.
void expect_kept(const GptRun& run, int64_t bytes) {
  const Curve expected = run.plain();
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    {
      const auto net = run.make();
      const auto engine = run.start(world, net).engine;
      recompute::take_checkpoint_statistics();
      expect_same(run.train(*engine, *net), expected, 5e-6, 2e-5);
      EXPECT_TRUE(engine->joined_operators().empty());
      const recompute::CheckpointStatistics kept = recompute::take_checkpoint_statistics();
      EXPECT_EQ(kept.regions, run.steps * run.accumulation * run.model.layers);
      EXPECT_EQ(kept.recomputations, kept.regions);
      EXPECT_EQ(kept.bytes_kept, kept.regions * bytes);
    }
    EXPECT_EQ(recompute::checkpoint_options().tensor_parallel_group, nullptr) << "the engine has ended";
  });
}

TEST(TensorParallelRegions, WholeInputsAreCutOverTheAxis) {
  for (const auto& [tensor, stage, tied] :
       test::grid_sample(2, std::vector{2, 4}, std::vector{0, 3}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", tied " << tied);
    GptRun run{.tensor = tensor, .stage = stage, .accumulation = 2, .model = small_gpt(tied)};
    run = with_regions(run, {{"partition_activations", true}});
    expect_kept(run, hidden_bytes(run) / tensor);
  }
}

TEST(TensorParallelRegions, WithoutTheKeyTheyAreWhole) {
  const GptRun run = with_regions({.stage = 1}, nlohmann::json::object());
  expect_kept(run, hidden_bytes(run));
}

// Between layers each rank has a part of the tokens: it stays where it is, and is not cut again.
TEST(TensorParallelRegions, PartsOfSequencesStayParts) {
  GptRun run = with_regions({.data = 2, .stage = 3}, {{"partition_activations", true}});
  run.more["tensor_parallel"] = {{"sequence_parallel", true}};
  expect_kept(run, hidden_bytes(run) / 2);
}

TEST(TensorParallelRegions, InBuffersThatStay) {
  const GptRun run = with_regions(
      {.data = 2, .stage = 2},
      {{"partition_activations", true}, {"contiguous_memory_optimization", true}, {"number_checkpoints", 2}});
  expect_kept(run, hidden_bytes(run) / 2);
}

// An engine after another on one thread, without an axis: its ranks have different inputs.
TEST(TensorParallelRegions, TheNextEngineHasItsOwnAxis) {
  const GptRun split = with_regions({.tensor = 2, .steps = 3}, {{"partition_activations", true}});
  GptRun plain = with_regions({.tensor = 1, .data = 2, .stage = 1, .steps = 3}, {{"partition_activations", true}});
  const Curve expected = plain.plain();
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto first = split.make();
    auto engine = split.start(world, first).engine;
    split.train(*engine, *first);
    std::thread([&] { engine.reset(); }).join();
    EXPECT_NE(recompute::checkpoint_options().tensor_parallel_group, nullptr) << "it ended elsewhere";
    const auto second = plain.make();
    const auto next = plain.start(world, second).engine;
    EXPECT_EQ(recompute::checkpoint_options().tensor_parallel_group, nullptr);
    expect_same(plain.train(*next, *second), expected, 5e-6, 2e-5);
  });
}

TEST(TensorParallelRegions, ThePlanSaysIt) {
  GptRun run = with_regions({}, {{"partition_activations", true}});
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    EXPECT_THAT(to_table(engine->plan()), AllOf(HasSubstr("each rank keeps 1/2 of whole inputs of regions"),
                                                HasSubstr("over the tensor axis"), Not(HasSubstr("no effect"))));
  });
}

}  // namespace
}  // namespace ds::engine
