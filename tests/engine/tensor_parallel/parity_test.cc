// Engines whose ranks have parts of layers train as plain torch does in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/gpt/gpt_layers.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

// A sample cuts most curves short.
constexpr int kWholeCurve = 50;
int steps_of_a_curve() { return test::whole_grid_wanted() ? kWholeCurve : 12; }

enum class Way { kPlain, kSequences, kRecomputation };

const char* name_of(Way way) {
  return way == Way::kPlain ? "plain" : way == Way::kSequences ? "sequence regions" : "recomputation";
}

// Ten steps of a sample. The whole grid trains 50: of tied models in float64, for one steep step moves a norm of
// float32 by 2.4e-5 there whatever the layout.
TEST(TensorParallelEngine, TrainsAsPlainTorch) {
  const bool whole_grid = test::whole_grid_wanted();
  for (const auto& [tensor, stage, data, tied, way] :
       test::grid_sample(2, std::vector{1, 2, 4}, std::vector{0, 1, 2, 3}, std::vector{1, 2}, std::vector{false, true},
                         std::vector{Way::kPlain, Way::kSequences, Way::kRecomputation})) {
    if (tensor == 1 && way == Way::kSequences) continue;  // there is no axis to cut them over
    SCOPED_TRACE(testing::Message() << "tensor " << tensor << ", stage " << stage << ", data " << data << ", tied "
                                    << tied << ", " << name_of(way));
    GptRun run{.tensor = tensor, .data = data, .stage = stage, .model = small_gpt(tied)};
    if (way == Way::kSequences) run.more["tensor_parallel"]["sequence_parallel"] = true;
    run.model.activation_checkpointing = way == Way::kRecomputation;
    if (whole_grid) run.steps = kWholeCurve;
    run.float64 = whole_grid && tied;
    expect_same_as_plain(run, run.float64 ? 1e-11 : 5e-6, run.float64 ? 1e-10 : 2e-5);
  }
}

TEST(TensorParallelEngine, TiedModelsInFloat64AreTheSame) {
  for (const bool sequences : {false, true}) {
    GptRun run{
        .tensor = 2, .data = 1, .stage = 1, .steps = steps_of_a_curve(), .model = small_gpt(true), .float64 = true};
    run.more["tensor_parallel"]["sequence_parallel"] = sequences;
    expect_same_as_plain(run, 1e-11, 1e-10);
  }
}

TEST(TensorParallelEngine, TrainsAsPlainTorchForFiftySteps) {
  expect_same_as_plain({.tensor = 2, .data = 2, .stage = 3, .steps = kWholeCurve});
  expect_same_as_plain({.tensor = 4, .data = 1, .stage = 0, .steps = kWholeCurve, .model = small_gpt(true)});
}

// Parts of sequences; layers that are computed again; both. The whole grid makes 50 steps of each.
TEST(TensorParallelEngine, TrainsAsPlainTorchInOtherWaysToo) {
  for (const auto& [sequences, regions] : {std::pair{true, false}, {false, true}, {true, true}}) {
    SCOPED_TRACE(testing::Message() << "sequences " << sequences << ", regions " << regions);
    for (const int tensor : {2, 4}) {
      GptRun run{.tensor = tensor, .data = 4 / tensor, .stage = tensor == 2 ? 3 : 1, .steps = steps_of_a_curve()};
      run.model = small_gpt(/*tied=*/regions);
      run.model.activation_checkpointing = regions;
      run.more["tensor_parallel"]["sequence_parallel"] = sequences;
      run.more["activation_checkpointing"]["partition_activations"] = regions;
      expect_same_as_plain(run);
    }
  }
}

// By the names of its layers, which no stage has all of: what is fused, and how large heads are, the whole model tells.
TEST(TensorParallelEngine, StagesOfAGptTrainAsPlainTorch) {
  for (const auto& [schedule, tied, sequences] : test::grid_sample(
           2, std::vector<std::string>{"1f1b", "interleaved"}, std::vector{false, true}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << schedule << ", tied " << tied << ", sequences " << sequences);
    GptRun run{.stage = 1, .steps = 5, .accumulation = 4, .model = small_gpt(tied)};
    run.more["tensor_parallel"]["sequence_parallel"] = sequences;
    const Curve expected = run.plain();
    test::run_ranks(4, [&](comm::Communicator& world) {
      const auto engine =
          initialize({.model = gpt::make_layers(run.model, 3, {2, schedule}, std::make_shared<gpt::Drops>()),
                      .config = run.config(),
                      .communicator = {std::shared_ptr<void>(), &world},
                      .seed_generators = false})
              .engine;
      Curve found;
      int64_t next = 0;
      for (int step = 0; step < run.steps; ++step) {
        const at::Tensor loss = engine->train_batch([&] {
          const GptBatch batch = gpt_batch(next++, 0, run.model);
          return pipeline::MicroBatch{.inputs = {batch.tokens}, .labels = {batch.targets}};
        });
        found.losses.push_back(loss.item<double>());
        found.norms.push_back(engine->get_global_grad_norm().value_or(-1));
      }
      expect_same(found, expected, 5e-6, 2e-5);
      EXPECT_TRUE(engine->joined_operators().empty());
    });
  }
}

}  // namespace
}  // namespace ds::engine
