// A rank's parts beside the device: files, a part on the host, updates that come one step later.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/model/offloaded/offload_run.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

GptRun offloaded(GptRun run, const ordered_json& optimizer, const ordered_json& parameters = {}) {
  auto& zero = run.more["zero_optimization"];
  if (!optimizer.is_null()) zero["offload_optimizer"] = optimizer;
  if (!parameters.is_null()) zero["offload_param"] = parameters;
  return run;
}

// Files hold the state of parts: half of what one rank would have, and of what stays whole all.
void expect_half_files(const GptRun& run) {
  const auto kept = [&](GptRun of) {
    int64_t bytes = 0;
    of.steps = 1;
    test::run_ranks(of.world(), [&](comm::Communicator& world) {
      const auto net = of.make();
      const auto engine = of.start(world, net).engine;
      of.train(*engine, *net);
      if (world.rank() == 0) bytes = engine->offloaded_state_bytes().file;
    });
    return bytes;
  };
  GptRun whole = run;
  whole.tensor = 1;
  const double ratio = static_cast<double>(kept(run)) / static_cast<double>(kept(whole));
  EXPECT_GT(ratio, 0.45);
  EXPECT_LT(ratio, 0.65);
}

TEST(TensorParallelOffload, OptimizerInFiles) {
  for (const int stage : {1, 3}) {
    const GptRun run = offloaded({.data = 2, .stage = stage}, on_disk());
    expect_same_as_plain(run);
    expect_half_files(run);
  }
}

TEST(TensorParallelOffload, AllInFiles) {
  expect_same_as_plain(
      offloaded({.stage = 3, .model = small_gpt(/*tied=*/true)}, on_disk(), on_disk({{"max_in_cpu", 0}})));
  GptRun four = offloaded({.tensor = 4, .stage = 3}, on_disk(), on_host());
  four.more["tensor_parallel"] = {{"sequence_parallel", true}};
  expect_same_as_plain(four);
}

TEST(TensorParallelOffload, APartOfTheOptimizerOnTheHost) {
  expect_same_as_plain(offloaded({.data = 2, .stage = 2}, on_host({{"ratio", 0.5}})));
}

// The update of a step runs beside the next one: not plain torch's weights, but those of one rank that does the same.
TEST(TensorParallelOffload, DelayedUpdates) {
  for (const int stage : {1, 3}) {
    const auto delayed = on_host({{"delayed_update", true}, {"delayed_update_start", 3}});
    const GptRun run = offloaded({.data = 2, .stage = stage, .model = small_gpt(/*tied=*/stage == 3)}, delayed);
    expect_same_as_one_rank(run, 5e-6, 2e-5);
  }
}

TEST(TensorParallelOffload, DelayedUpdatesOfSummedParameters) {
  GptRun run = offloaded({.stage = 2}, on_host({{"delayed_update", true}, {"delayed_update_start", 3}}));
  run.more["tensor_parallel"] = {{"sequence_parallel", true}};
  expect_same_as_one_rank(run, 5e-6, 2e-5);
}

}  // namespace
}  // namespace ds::engine
