// Checkpoints with an optimizer's states between fully_shard and the engine.
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "dsengine/engine.h"
#include "dsengine/fully_shard.h"
#include "dsengine/initialize.h"
#include "tests/loops/block_net.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

constexpr int kSavedSteps = 3;
constexpr int kNextSteps = 3;
constexpr double kAsOne = 5e-6;

engine::Initialized engine_of(test::BlockNet& model, const test::MakeOptimizer& make, int stage,
                              comm::Communicator& communicator) {
  const nlohmann::ordered_json config = {{"train_micro_batch_size_per_gpu", 8},
                                         {"gradient_clipping", 0.0},  // as the loop
                                         {"zero_optimization", {{"stage", stage}}}};
  return engine::initialize({.model = model.ptr(),
                             .config = config,
                             .optimizer = std::shared_ptr<torch::optim::Optimizer>(make(model->parameters())),
                             .communicator = test::borrowed(communicator)});
}

void train_engine(engine::Engine& engine, test::BlockNet& model, int from, int steps) {
  for (int step = from; step < from + steps; ++step) {
    engine.backward(model->loss(test::joined_batch(step, 2)));
    engine.step();
  }
}

void train_sharded(torch::optim::Optimizer& optimizer, test::BlockNet& model, int from, int steps) {
  for (int step = from; step < from + steps; ++step) {
    model->loss(test::joined_batch(step, 2)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(OptimizerAndEngine, FullyShardGoesOnFromTheEnginesCheckpoints) {
  for (const auto& [name, make] : test::optimizers()) {
    SCOPED_TRACE(name);
    const test::NamedValues expected = test::train_plain(2, kSavedSteps + kNextSteps, make);
    for (const int stage : {1, 3}) {
      const test::ScratchFolder folder;
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        test::BlockNet model;
        const auto started = engine_of(model, make, stage, communicator);
        train_engine(*started.engine, model, 0, kSavedSteps);
        started.engine->save_checkpoint(folder.path().string());
      });
      test::run_ranks(3, [&](comm::Communicator& communicator) {
        test::BlockNet model;
        const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
        const auto optimizer = make(sharded->parameters());
        train_sharded(*optimizer, model, 20, 1);
        sharded->load(folder.path().string(), "", *optimizer);
        train_sharded(*optimizer, model, kSavedSteps, kNextSteps);
        EXPECT_LT(test::largest_difference(sharded->full_state_dict(), expected), kAsOne) << stage;
      });
    }
  }
}

TEST(OptimizerAndEngine, TheEngineGoesOnFromFullyShards) {
  for (const auto& [name, make] : test::optimizers()) {
    SCOPED_TRACE(name);
    const test::NamedValues expected = test::train_plain(2, kSavedSteps + kNextSteps, make);
    const test::ScratchFolder folder;
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto sharded = fully_shard(model, {.process_group = test::borrowed(communicator)});
      const auto optimizer = make(sharded->parameters());
      train_sharded(*optimizer, model, 0, kSavedSteps);
      sharded->save(folder.path().string(), "sharded", *optimizer);
    });
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      test::BlockNet model;
      const auto started = engine_of(model, make, /*stage=*/1, communicator);
      train_engine(*started.engine, model, 20, 1);
      started.engine->load_checkpoint(folder.path().string(), "sharded");
      train_engine(*started.engine, model, kSavedSteps, kNextSteps);
      EXPECT_LT(test::largest_difference(test::named_values(*model), expected), kAsOne);
    });
  }
}

}  // namespace
}  // namespace ds
