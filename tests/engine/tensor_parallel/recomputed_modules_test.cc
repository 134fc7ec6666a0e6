// Chosen modules whose parameters are split over a tensor axis, or are layers of a pipeline's stages.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "dsengine/module_checkpointing.h"
#include "examples/gpt/gpt_layers.h"
#include "tests/engine/tensor_parallel/split_training.h"
#include "tests/support/grid.h"

namespace ds::engine {
namespace {

// What one rank reports, and what was dropped.
struct ChosenCurve {
  Curve curve;
  ModuleCheckpointStatistics statistics;
};

GptRun with_modules(GptRun run, const std::string& pattern, const std::string& recompute) {
  run.more["activation_checkpointing"] = {{"modules", {pattern}}, {"recompute", recompute}};
  return run;
}

ChosenCurve train_split(const GptRun& run, comm::Communicator& world) {
  take_module_checkpoint_statistics();
  ChosenCurve result;
  const auto net = run.make();
  {
    const auto engine = run.start(world, net).engine;
    result.curve = run.train(*engine, *net);
    EXPECT_TRUE(engine->joined_operators().empty());
  }
  remove_activation_checkpointing(*net);
  result.statistics = take_module_checkpoint_statistics();
  return result;
}

TEST(RecomputedSplitModules, ATensorAxisTrainsTheSame) {
  for (const auto& [data, stage, sequence] :
       test::grid_sample(2, std::vector{1, 2}, std::vector{0, 1, 3}, std::vector{false, true})) {
    SCOPED_TRACE(testing::Message() << "data " << data << ", stage " << stage << ", sequence " << sequence);
    GptRun run{.tensor = 2, .data = data, .stage = stage, .steps = 4, .model = small_gpt()};
    if (sequence) run.more["tensor_parallel"] = {{"sequence_parallel", true}};
    test::run_ranks(run.world(), [&](comm::Communicator& world) {
      const ChosenCurve plain = train_split(run, world);
      EXPECT_EQ(plain.statistics.regions, 0);
      for (const char* recompute : {"all", "pointwise"}) {
        const ChosenCurve chosen = train_split(with_modules(run, "h\\.\\d+", recompute), world);
        EXPECT_EQ(chosen.curve.losses, plain.curve.losses) << recompute;
        EXPECT_EQ(chosen.curve.norms, plain.curve.norms) << recompute;
        EXPECT_EQ(chosen.statistics.regions, run.steps * run.model.layers);
        EXPECT_GT(chosen.statistics.dropped_tensors, chosen.statistics.regions) << recompute;
      }
    });
  }
}

ChosenCurve train_stages(const GptRun& run, const std::string& schedule, comm::Communicator& world) {
  take_module_checkpoint_statistics();
  ChosenCurve result;
  {
    const auto layers = gpt::make_layers(run.model, 3, {2, schedule}, std::make_shared<const gpt::Drops>());
    const std::shared_ptr<comm::Communicator> ranks(std::shared_ptr<void>(), &world);
    const auto engine =
        initialize({.model = layers, .config = run.config(), .communicator = ranks, .seed_generators = false}).engine;
    int64_t next = 0;
    for (int step = 0; step < run.steps; ++step) {
      const at::Tensor loss = engine->train_batch([&] {
        const GptBatch batch = gpt_batch(next++, 0, run.model);
        return pipeline::MicroBatch{.inputs = {batch.tokens}, .labels = {batch.targets}};
      });
      result.curve.losses.push_back(loss.item<double>());
      result.curve.norms.push_back(engine->get_global_grad_norm().value_or(-1));
    }
    remove_activation_checkpointing(*layers);
  }
  result.statistics = take_module_checkpoint_statistics();
  return result;
}

TEST(RecomputedSplitModules, LayersOfAPipelineTrainTheSame) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const std::string schedule : {"1f1b", "zb_h1"}) {
      SCOPED_TRACE(testing::Message() << "stage " << stage << ", " << schedule);
      GptRun run{.tensor = 1, .stage = stage, .steps = 3, .accumulation = 4, .model = small_gpt()};
      run.more["pipeline"] = {{"stages", 2}};
      test::run_ranks(2, [&](comm::Communicator& world) {
        const ChosenCurve plain = train_stages(run, schedule, world);
        for (const char* recompute : {"all", "pointwise"}) {
          const ChosenCurve chosen = train_stages(with_modules(run, "h\\.\\d+", recompute), schedule, world);
          EXPECT_EQ(chosen.curve.losses, plain.curve.losses) << recompute;
          EXPECT_EQ(chosen.curve.norms, plain.curve.norms) << recompute;
          EXPECT_GT(chosen.statistics.dropped_tensors, 0) << recompute;
        }
      });
    }
  }
}

}  // namespace
}  // namespace ds::engine
