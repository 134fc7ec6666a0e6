// Engines whose ranks have parts of layers train as plain torch does in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

TEST(TensorParallelEngine, TrainsAsPlainTorch) {
  for (const auto& [tensor, stage, data, tied] : test::grid_sample(2, std::vector{1, 2, 4}, std::vector{0, 1, 2, 3},
                                                                   std::vector{1, 2}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", data " << data << ", tied "
                                    << tied);
    expect_same_as_plain({.tensor = tensor, .data = data, .stage = stage, .model = small_gpt(tied)});
  }
}

TEST(TensorParallelEngine, TiedModelsInFloat64AreTheSame) {
  for (const bool sequences : {false, true}) {
    GptRun run{.tensor = 2, .data = 1, .stage = 1, .steps = 50, .model = small_gpt(true), .float64 = true};
    run.more["tensor_parallel"]["sequence_parallel"] = sequences;
    expect_same_as_plain(run, 1e-11, 1e-10);
  }
}

TEST(TensorParallelEngine, TrainsAsPlainTorchForFiftySteps) {
  expect_same_as_plain({.tensor = 2, .data = 2, .stage = 3, .steps = 50});
  expect_same_as_plain({.tensor = 4, .data = 1, .stage = 0, .steps = 50, .model = small_gpt(true)});
}

// Parts of sequences; layers that are computed again; both.
TEST(TensorParallelEngine, TrainsAsPlainTorchForFiftyStepsInOtherWaysToo) {
  for (const auto& [sequences, regions] : {std::pair{true, false}, {false, true}, {true, true}}) {
    SCOPED_TRACE(testing::Message() << "sequences " << sequences << ", regions " << regions);
    for (const int tensor : {2, 4}) {
      GptRun run{.tensor = tensor, .data = 4 / tensor, .stage = tensor == 2 ? 3 : 1, .steps = 50};
      run.model = small_gpt(/*tied=*/regions);
      run.model.activation_checkpointing = regions;
      run.more["tensor_parallel"]["sequence_parallel"] = sequences;
      run.more["activation_checkpointing"]["partition_activations"] = regions;
      expect_same_as_plain(run);
    }
  }
}

}  // namespace
}  // namespace ds::engine
