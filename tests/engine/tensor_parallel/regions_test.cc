// Checkpointed regions over a tensor axis: what they keep between forward and backward, and that training stays that of
// plain torch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "config/plan/plan.h"
#include "dsengine/activation_checkpoint.h"
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

GptRun over_axis() { return with_regions({.tensor = 2, .steps = 3}, {{"partition_activations", true}}); }
// Its ranks have different inputs.
GptRun over_data() {
  return with_regions({.tensor = 1, .data = 2, .stage = 1, .steps = 3}, {{"partition_activations", true}});
}

// Trains and keeps `bytes` of each input. Settings, among them profile, are those of the last engine of the thread.
void expect_kept_by(Engine& engine, gpt::Gpt& net, const GptRun& run, const Curve& expected, int64_t bytes) {
  recompute::take_checkpoint_statistics();
  expect_same(run.train(engine, net), expected, 5e-6, 2e-5);
  const recompute::CheckpointStatistics kept = recompute::take_checkpoint_statistics();
  EXPECT_EQ(kept.regions, run.steps * run.model.layers);
  EXPECT_EQ(kept.bytes_kept, kept.regions * bytes);
}

TEST(TensorParallelRegions, EnginesOfOneThreadHaveTheirOwnRanks) {
  const GptRun split = over_axis();
  const GptRun plain = over_data();
  const Curve of_split = split.plain();
  const Curve of_plain = plain.plain();
  for (const bool split_first : {true, false}) {
    SCOPED_TRACE(split_first);
    test::run_ranks(2, [&](comm::Communicator& world) {
      const auto cut = split.make();
      const auto whole = plain.make();
      std::shared_ptr<Engine> of_cut;
      std::shared_ptr<Engine> of_whole;
      if (split_first) of_cut = split.start(world, cut).engine;
      of_whole = plain.start(world, whole).engine;
      if (!split_first) of_cut = split.start(world, cut).engine;
      expect_kept_by(*of_whole, *whole, plain, of_plain, hidden_bytes(plain));
      expect_kept_by(*of_cut, *cut, split, of_split, hidden_bytes(split) / 2);
    });
  }
}

TEST(TensorParallelRegions, AnEngineThatEndedElsewhereLeavesNothing) {
  const GptRun split = over_axis();
  const GptRun plain = over_data();
  const Curve expected = plain.plain();
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto first = split.make();
    auto engine = split.start(world, first).engine;
    split.train(*engine, *first);
    std::thread([&] { engine.reset(); }).join();
    const auto second = plain.make();
    const auto next = plain.start(world, second).engine;
    expect_kept_by(*next, *second, plain, expected, hidden_bytes(plain));
  });
}

TEST(TensorParallelRegions, TheProgramsGroupStays) {
  const GptRun split = over_axis();
  const Curve expected = split.plain();
  test::run_ranks(2, [&](comm::Communicator& world) {
    const std::shared_ptr<comm::Communicator> own(std::shared_ptr<void>(), &world);
    recompute::CheckpointOptions options;
    options.tensor_parallel_group = own;
    recompute::configure_checkpointing(options);
    {
      const auto net = split.make();
      const auto engine = split.start(world, net).engine;
      EXPECT_EQ(recompute::checkpoint_options().tensor_parallel_group, own);
      expect_kept_by(*engine, *net, split, expected, hidden_bytes(split) / 2);
    }
    EXPECT_EQ(recompute::checkpoint_options().tensor_parallel_group, own);
    recompute::configure_checkpointing({});  // the ranks end before their threads may
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
