// Checkpoints of every optimizer, and into another one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/model/client_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ordered_json with_optimizer(int stage, const std::string& type) {
  ordered_json config = small_config(stage, 1);
  config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.01}}}};
  config["zero_allow_untested_optimizer"] = true;
  if (type == "SGD") config["optimizer"]["params"]["momentum"] = 0.9;
  return config;
}

class CheckpointOptimizer : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Types, CheckpointOptimizer,
                         ::testing::Values("Adam", "AdamW", "SGD", "Lion", "Adagrad", "Lamb", "Muon", "RMSprop",
                                           "Adamax", "NAdam", "RAdam", "Adadelta"),
                         [](const auto& type) { return std::string(type.param); });

TEST_P(CheckpointOptimizer, GoesOnAlsoInAnotherLayout) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  State end;
  const auto steps = [](Engine& engine, SmallNet& model, int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) {
      engine.backward(model->loss(sample(step, engine.global_rank())));
      engine.step();
    }
    return copy_of(engine.fp32_state_dict());
  };
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_optimizer(1, GetParam()), communicator).engine;
    steps(*engine, model, 0, 3);
    engine->save_checkpoint(dir, "tag");
    const State own = steps(*engine, model, 3, 6);
    if (communicator.rank() == 0) end = own;
  });
  for (const int stage : {1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      forget(*model);
      const auto engine = start(model.ptr(), with_optimizer(stage, GetParam()), communicator).engine;
      engine->load_checkpoint(dir, "tag");
      const State own = steps(*engine, model, 3, 6);
      const double difference = largest_difference(own, end);
      if (stage == 1) EXPECT_EQ(difference, 0.0);
      EXPECT_LT(difference, 1e-4) << stage;
    });
  }
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model;
    forget(*model);
    const auto engine = start(model.ptr(), with_optimizer(3, GetParam()), communicator).engine;
    engine->load_checkpoint(dir, "tag");
    engine->save_checkpoint(dir, "again");
  });
  expect_same_state(dir + "/tag", dir + "/again");
}

// Before anything is changed.
TEST(CheckpointOptimizers, OneThatKeepsOtherStatesIsAnError) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const std::vector<std::string> types = {"AdamW", "SGD", "Lion", "Adagrad", "Muon"};
  for (const std::string& type : types) {
    run_ranks(1, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), with_optimizer(1, type), communicator).engine;
      train(*engine, model, 2);
      engine->save_checkpoint(dir, type);
    });
  }
  for (const std::string& type : types) {
    for (const std::string& other : types) {
      if (type == other) continue;
      SCOPED_TRACE(other + " -> " + type);
      run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), with_optimizer(2, type), communicator).engine;
        const State before = copy_of(engine->fp32_state_dict());
        EXPECT_THAT([&] { engine->load_checkpoint(dir, other); },
                    ThrowsMessage<UsageError>(
                        AllOf(HasSubstr(other), HasSubstr(type), HasSubstr("load_optimizer_states = false"))));
        EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
        EXPECT_EQ(engine->global_steps(), 0);
        train(*engine, model, 1);
        EXPECT_TRUE(engine->load_checkpoint(dir, other, {.load_optimizer_states = false}));
        EXPECT_EQ(engine->global_steps(), 2);
        train(*engine, model, 1);
      });
    }
  }
}

// Adam's states mean the same to Lamb; the program may want that.
TEST(CheckpointOptimizers, OneThatKeepsTheSameStatesIsSaid) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_optimizer(1, "AdamW"), communicator).engine;
    train(*engine, model, 2);
    engine->save_checkpoint(dir, "tag");
    SmallNet other;
    const auto loaded = start(other.ptr(), with_optimizer(1, "Lamb"), communicator).engine;
    testing::internal::CaptureStderr();
    testing::internal::CaptureStdout();
    loaded->load_checkpoint(dir, "tag");
    EXPECT_THAT(testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("written by AdamW"), HasSubstr("goes on with Lamb")));
  });
}

TEST(CheckpointOptimizers, OptionsThatAreTheCheckpointsAreSaid) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    ordered_json config = with_optimizer(1, "AdamW");
    config["optimizer"]["params"] = {{"lr", 0.1}, {"weight_decay", 0.5}};
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    train(*engine, model, 1);
    engine->save_checkpoint(dir, "tag");
    config["optimizer"]["params"] = {{"lr", 0.02}, {"weight_decay", 0.25}};
    SmallNet other;
    const auto loaded = start(other.ptr(), config, communicator).engine;
    testing::internal::CaptureStderr();
    loaded->load_checkpoint(dir, "tag");
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("parameter group 0 has from the checkpoint, not from here: "),
                      HasSubstr("lr 0.1 (not 0.02), weight_decay 0.5 (not 0.25)")));
    EXPECT_EQ(loaded->get_lr()[0], 0.1);
  });
}

// Of a class of the program's, which at stage 0 steps on whole parameters: torch::save() of it is in the checkpoint.
struct OwnAdam final : torch::optim::Adam {
  using Adam::Adam;
};

Initialized start_with(SmallNet& model, const ordered_json& like, std::shared_ptr<torch::optim::Optimizer> optimizer,
                       comm::Communicator& communicator) {
  ordered_json config = like;
  config.erase("optimizer");
  return initialize({.model = model.ptr(),
                     .config = config,
                     .optimizer = std::move(optimizer),
                     .communicator = borrowed(communicator)});
}

TEST(CheckpointOptimizers, OneOfTheProgramOnWholeParameters) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto make = [](SmallNet& model, comm::Communicator& communicator) {
    return start_with(model, small_config(0, 1),
                      std::make_shared<OwnAdam>(model->parameters(), torch::optim::AdamOptions(0.03)), communicator);
  };
  State end;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = make(model, communicator).engine;
    train(*engine, model, 3);
    engine->save_checkpoint(dir, "client");
    const State own = train(*engine, model, 3);
    if (communicator.rank() == 0) end = own;
    SmallNet other;
    const auto configured = start(other.ptr(), small_config(0, 1), communicator).engine;
    configured->save_checkpoint(dir, "configured");
  });
  for (const int world : {2, 1}) {
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet model;
      forget(*model);
      const auto engine = make(model, communicator).engine;
      engine->load_checkpoint(dir, "client");
      if (world == 2) EXPECT_EQ(largest_difference(train(*engine, model, 3), end), 0.0);
      // The configured one has no such state, and the other way round.
      const State before = copy_of(engine->fp32_state_dict());
      EXPECT_THAT([&] { engine->load_checkpoint(dir, "configured"); },
                  ThrowsMessage<UsageError>(HasSubstr("client optimizer")));
      EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
      train(*engine, model, 1);
      SmallNet other;
      const auto configured = start(other.ptr(), small_config(0, 1), communicator).engine;
      EXPECT_THAT([&] { configured->load_checkpoint(dir, "client"); },
                  ThrowsMessage<UsageError>(HasSubstr("load_optimizer_states = false")));
      train(*configured, other, 1);
    });
  }
}

// Saved at stage 3 on 2 ranks, gone on with at other stages and on other numbers of ranks.
class CheckpointClient : public ::testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Types, CheckpointClient, ::testing::Values("SGD", "AMSGrad", "AdamW", "RMSprop", "Adagrad"),
                         [](const auto& type) { return std::string(type.param); });

std::vector<double> losses_of(Engine& engine, SmallNet& model, int64_t first, int64_t last) {
  std::vector<double> losses;
  for (int64_t step = first; step < last; ++step) {
    at::Tensor loss;
    for (int64_t micro = 0; micro < engine.gradient_accumulation_steps(); ++micro) {
      const int64_t index = engine.global_rank() * engine.gradient_accumulation_steps() + micro;
      loss = model->loss(sample(step, static_cast<int>(index)));
      engine.backward(loss);
      engine.step();
    }
    losses.push_back(loss.item<double>());
  }
  return losses;
}

TEST_P(CheckpointClient, GoesOnInEveryLayout) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto begin = [](SmallNet& model, int stage, comm::Communicator& communicator) {
    // 4 micro-batches in all.
    return start_with(model, small_config(stage, 4 / communicator.size()), torch_optimizer(GetParam(), model),
                      communicator)
        .engine;
  };
  State end;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = begin(model, 3, communicator);
    losses_of(*engine, model, 0, 3);
    engine->save_checkpoint(dir, "tag");
    losses_of(*engine, model, 3, 6);
    const State own = copy_of(engine->fp32_state_dict());
    if (communicator.rank() == 0) end = own;
  });
  const std::vector<std::pair<int, int>> layouts = {{2, 3}, {4, 1}, {1, 0}, {2, 2}, {2, 0}};
  for (const auto& [world, stage] : layouts) {
    run_ranks(world, [&, world = world, stage = stage](comm::Communicator& communicator) {
      SmallNet model;
      forget(*model);
      const auto engine = begin(model, stage, communicator);
      engine->load_checkpoint(dir, "tag");
      losses_of(*engine, model, 3, 6);
      const double difference = largest_difference(copy_of(engine->fp32_state_dict()), end);
      if (stage == 3) EXPECT_EQ(difference, 0.0);
      EXPECT_LT(difference, 1e-5) << "stage " << stage << " on " << world;
    });
  }
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model;
    forget(*model);
    const auto engine = begin(model, 2, communicator);
    engine->load_checkpoint(dir, "tag");
    engine->save_checkpoint(dir, "again");
  });
  expect_same_state(dir + "/tag", dir + "/again");
}

// They keep the same states under the same names.
TEST(CheckpointOptimizers, OneOfTheProgramGoesOnFromTheConfigs) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto configured = start(model.ptr(), small_config(2, 1), communicator).engine;
    losses_of(*configured, model, 0, 3);
    configured->save_checkpoint(dir, "configured");
    const std::vector<double> expected = losses_of(*configured, model, 3, 6);
    SmallNet other;
    forget(*other);
    const auto client = std::make_shared<torch::optim::AdamW>(other->parameters(), torch::optim::AdamWOptions(0.7));
    const auto engine = start_with(other, small_config(1, 1), client, communicator).engine;
    engine->load_checkpoint(dir, "configured");
    EXPECT_EQ(engine->get_lr(), std::vector<double>{0.02});
    EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(client->param_groups()[0].options()).weight_decay(), 0.1);
    const std::vector<double> losses = losses_of(*engine, other, 3, 6);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 5e-6);
    SmallNet third;
    const auto sgd = start_with(third, small_config(1, 1), torch_optimizer("SGD", third), communicator).engine;
    EXPECT_THAT([&] { sgd->load_checkpoint(dir, "configured"); },
                ThrowsMessage<UsageError>(HasSubstr("load_optimizer_states = false")));
  });
}

TEST(CheckpointOptimizers, ParameterGroups) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  const auto grouped = [](SmallNet& model, comm::Communicator& communicator, bool groups, double lr) {
    ordered_json config = small_config(2, 1);
    config["optimizer"]["params"]["lr"] = lr;
    InitializeOptions options{.model = model.ptr(), .config = config, .communicator = borrowed(communicator)};
    if (groups) options.parameter_groups = {{.parameters = {"*bias"}, .lr = 0.001, .weight_decay = 0.0}};
    return initialize(options);
  };
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto parts = grouped(model, communicator, true, 0.02);
    parts.optimizer->groups()[1].lr = 0.0005;  // by the program
    train(*parts.engine, model, 2);
    parts.engine->save_checkpoint(dir, "tag");
  });
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = grouped(model, communicator, true, 0.7).engine;
    engine->load_checkpoint(dir, "tag");
    EXPECT_EQ(engine->get_lr(), (std::vector<double>{0.02, 0.0005}));
    SmallNet other;
    const auto without = grouped(other, communicator, false, 0.7).engine;
    without->load_checkpoint(dir, "tag");
    EXPECT_EQ(without->get_lr(), std::vector<double>{0.7});  // other groups: its own
    EXPECT_EQ(largest_difference(copy_of(without->fp32_state_dict()), copy_of(engine->fp32_state_dict())), 0.0);
  });
}

}  // namespace
}  // namespace ds::engine
