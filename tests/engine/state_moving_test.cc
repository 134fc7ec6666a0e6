// offload_states() and reload_states().
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "core/check.h"
#include "dsengine/engine.h"
#include "profiling/tensor_memory.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct MovingCell {
  int stage;
  int world;
  const char* precision;
};

class StateMoving : public ::testing::TestWithParam<MovingCell> {
 protected:
  ordered_json config() const {
    ordered_json config = small_config(GetParam().stage, 1);
    if (std::string(GetParam().precision) != "fp32") config[GetParam().precision]["enabled"] = true;
    return config;
  }
};

std::vector<MovingCell> moving_cells() {
  std::vector<MovingCell> cells;
  for (const int stage : {0, 1, 2, 3}) {
    for (const int world : {1, 2}) {
      for (const char* precision : {"fp32", "bf16"}) cells.push_back({stage, world, precision});
    }
  }
  return cells;
}

INSTANTIATE_TEST_SUITE_P(Grid, StateMoving, ::testing::ValuesIn(moving_cells()), [](const auto& cell) {
  return cat("Stage", cell.param.stage, "Ranks", cell.param.world, cell.param.precision);
});

TEST_P(StateMoving, TrainingGoesOnAsIfNothingHappened) {
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    const auto run = [&](const std::function<void(Engine&)>& between) {
      SmallNet model;
      const auto engine = start(model.ptr(), config(), communicator).engine;
      train(*engine, model, 2);
      between(*engine);
      return train(*engine, model, 2);
    };
    const State plain = run([](Engine&) {});
    const State moved = run([](Engine& engine) {
      engine.offload_states();
      EXPECT_GT(engine.moved_bytes(), 0);
      engine.reload_states();
      EXPECT_EQ(engine.moved_bytes(), 0);
    });
    EXPECT_EQ(largest_difference(moved, plain), 0.0);
    const State only_states = run([](Engine& engine) {
      engine.offload_states({.hp_params = false, .lp_params = false});
      engine.reload_states();
      engine.offload_states({.optim_states = false, .lp_grads = false});
      engine.reload_states();
    });
    EXPECT_EQ(largest_difference(only_states, plain), 0.0);
  });
}

TEST_P(StateMoving, TheDevicesMemoryIsFree) {
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    const profiling::TensorMemory memory;
    SmallNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    train(*engine, model, 2);
    const int64_t before = memory.live_bytes();
    const int64_t state = engine->model_state_bytes().total();
    engine->offload_states();
    // What stays are small tensors: the input to a collective, empty parameters.
    EXPECT_LE(memory.live_bytes(), before - state + 512);
    engine->reload_states();
    EXPECT_LE(memory.live_bytes(), before);
    train(*engine, model, 1);
    EXPECT_LE(memory.live_bytes(), before + 512);
  });
}

TEST_P(StateMoving, InBetweenEveryUseIsRefused) {
  test::run_ranks(GetParam().world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    train(*engine, model, 1);
    engine->offload_states();
    const auto expect_refusal = [&](const std::function<void()>& use, const char* text) {
      try {
        use();
        ADD_FAILURE() << "expected an error with " << text;
      } catch (const std::exception& error) {
        EXPECT_THAT(error.what(), HasSubstr(text));
      }
    };
    expect_refusal([&] { model->loss(sample(0, 0)); }, "must be a matrix, got 1-D");  // of shapes, by LibTorch
    const at::Tensor loss = torch::ones({1}).requires_grad_().sum();
    expect_refusal([&] { engine->backward(loss); }, "reload_states()");
    expect_refusal([&] { engine->fp32_state_dict(); }, "reload_states()");
    expect_refusal([&] { engine->module_state_dict(); }, "reload_states()");
    expect_refusal([&] { engine->model_state_bytes(); }, "reload_states()");
    expect_refusal([&] { auto scope = engine->gathered_parameters({model->last->weight}); }, "reload_states()");
    expect_refusal([&] { engine->offload_states(); }, "reload_states()");
    engine->reload_states();
    expect_refusal([&] { engine->reload_states(); }, "no states are offloaded");
    engine->backward(model->loss(sample(1, communicator.rank())));
    engine->step();
  });
}

TEST(StateMovingEngine, InsideAnAccumulationItIsRefused) {
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(2, 2), communicator).engine;
    engine->backward(model->loss(sample(0, 0)));
    EXPECT_THROW(engine->offload_states(), UsageError);
    engine->step();
    EXPECT_THROW(engine->offload_states(), UsageError);
    engine->backward(model->loss(sample(1, 0)));
    engine->step();
    engine->offload_states();
    engine->reload_states();
  });
}

TEST(StateMovingEngine, AHostWithoutRoomLeavesEverythingWhereItIs) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](bool fails) {
      SmallNet model;
      model->first->weight.set_requires_grad(false);
      const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
      train(*engine, model, 1);
      if (fails) {
        // One rank needs more than there is: it says that its storage is longer.
        at::Storage storage = model->first->weight.storage();
        const size_t bytes = storage.nbytes();
        if (communicator.rank() == 1) storage.set_nbytes(size_t{1} << 50);
        EXPECT_THAT([&] { engine->offload_states(); },
                    ThrowsMessage<ConfigError>(HasSubstr("on all ranks of this host (2)")));
        storage.set_nbytes(bytes);
        EXPECT_EQ(engine->moved_bytes(), 0);
      }
      return train(*engine, model, 1);
    };
    EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
  });
}

TEST(StateMovingEngine, WhatLivesElsewhereStaysThere) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto run = [&](bool moves) {
      SmallNet model;
      ordered_json config = small_config(3, 1);
      config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
      config["zero_optimization"]["offload_param"] = {{"device", "cpu"}};
      const auto engine = start(model.ptr(), config, communicator).engine;
      train(*engine, model, 1);
      if (moves) {
        engine->offload_states();
        EXPECT_EQ(engine->moved_bytes(), 0);
        engine->reload_states();
      }
      return train(*engine, model, 1);
    };
    EXPECT_EQ(largest_difference(run(true), run(false)), 0.0);
  });
}

}  // namespace
}  // namespace ds::engine
