// A thousand steps take what a hundred do: memory of tensors, of the process, and descriptors. A sample makes 400
// steps.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "profiling/tensor_memory.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

struct Taken {
  int64_t tensors = 0;  // bytes of this rank's
  int64_t peak = 0;     // of a step
  int64_t resident = 0, descriptors = 0;
};

int64_t resident_bytes() {
  int64_t mapped = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> mapped >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t open_descriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return std::distance(begin(open), end(open));
}

void expect_steady(GptRun run) {
  run.model = {.layers = 1, .hidden = 16, .heads = 2, .seq_len = 8, .vocab = 20};
  run.model.activation_checkpointing = run.more.contains("activation_checkpointing");
  run.more["steps_per_print"] = 1'000'000;
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    profiling::TensorMemory memory;
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const auto make_steps = [&](int64_t until) {
      while (engine->global_steps() < until) {
        const GptBatch batch = gpt_batch(engine->global_steps() % 7, 0, run.model);
        engine->backward(net->forward(batch.tokens, batch.targets));
        engine->step();
      }
    };
    const auto take = [&](int64_t until) {
      make_steps(until - 1);
      memory.take_peak_bytes();
      make_steps(until);
      Taken taken{.tensors = memory.live_bytes(), .peak = memory.take_peak_bytes()};
      world.barrier();
      if (world.rank() == 0) {  // of the process; a look at them opens one
        taken.resident = resident_bytes();
        taken.descriptors = open_descriptors();
      }
      world.barrier();
      return taken;
    };
    const Taken early = take(100);
    const Taken late = take(test::whole_grid_wanted() ? 1000 : 400);
    EXPECT_GT(early.tensors, 0);
    EXPECT_EQ(late.tensors, early.tensors);
    EXPECT_EQ(late.peak, early.peak);
    EXPECT_EQ(late.descriptors, early.descriptors);
    EXPECT_LT(late.resident, early.resident + (int64_t{1} << 20)) << "more than 1 KB in each step of a thousand";
  });
}

TEST(TensorParallelSteady, ManySteps) { expect_steady({.stage = 1}); }

TEST(TensorParallelSteady, ManyStepsOfSummedParametersInRegions) {
  GptRun run{.stage = 3};
  run.more["tensor_parallel"] = {{"sequence_parallel", true}, {"tp_overlap_comm", true}};
  run.more["activation_checkpointing"] = {{"partition_activations", true}};
  expect_steady(run);
}

}  // namespace
}  // namespace ds::engine
