// A load into an engine that has trained: nothing of what it had stays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "checkpoint/module_weights.h"
#include "core/check.h"
#include "dsengine/checkpoint.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Autocast keeps casted copies of weights, by parameter, until a backward.
TEST(CheckpointReload, ForwardUnderAutocastSeesTheLoadedWeights) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    const test::ScratchFolder folder;
    nlohmann::ordered_json config = carried_config(0, 1);
    config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}};
    CarriedNet model;
    auto [engine, optimizer, loader, schedule] = start(model.ptr(), config, communicator);
    const at::Tensor x = rows_of(0, 0, 1);
    const double first = model->loss(x).item<double>();
    engine->save_checkpoint(folder.path().string(), "first");
    train_until(*engine, model, 5);
    const double trained = model->loss(x).item<double>();
    EXPECT_NE(trained, first);
    engine->load_checkpoint(folder.path().string(), "first");
    EXPECT_EQ(model->loss(x).item<double>(), first);
  });
}

std::shared_ptr<Engine> start_with(const CarriedNet& model, std::shared_ptr<torch::optim::Optimizer> optimizer,
                                   comm::Communicator& communicator) {
  nlohmann::ordered_json config = carried_config(0, 1);
  config.erase("optimizer");
  config.erase("scheduler");
  return initialize({.model = model.ptr(),
                     .config = config,
                     .optimizer = std::move(optimizer),
                     .communicator = borrowed(communicator)})
      .engine;
}

std::shared_ptr<torch::optim::Optimizer> adam_of(const CarriedNet& model) {
  return std::make_shared<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(0.02));
}

TEST(CheckpointReload, AClientOptimizerForgetsWhatItHad) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    const test::ScratchFolder folder;
    CarriedNet model;
    const auto engine = start_with(model, adam_of(model), communicator);
    engine->save_checkpoint(folder.path().string(), "first");  // no states yet
    const State once = train_until(*engine, model, 4);
    engine->load_checkpoint(folder.path().string(), "first");
    EXPECT_EQ(engine->global_steps(), 0);
    EXPECT_EQ(largest_difference(train_until(*engine, model, 4), once), 0.0);
  });
}

TEST(CheckpointReload, AnotherClientOptimizerIsRefusedBeforeAnythingChanges) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    const test::ScratchFolder folder;
    {
      CarriedNet model;
      const auto engine = start_with(model, adam_of(model), communicator);
      train_until(*engine, model, 2);
      engine->save_checkpoint(folder.path().string(), "adam");
    }
    CarriedNet model;
    const auto sgd =
        std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
    const auto engine = start_with(model, sgd, communicator);
    const State before = train_until(*engine, model, 3);
    const auto load = [&] { engine->load_checkpoint(folder.path().string(), "adam"); };
    EXPECT_THAT(load, ThrowsMessage<UsageError>(HasSubstr("load_optimizer_states = false")));
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    train_until(*engine, model, 4);
    engine->load_checkpoint(folder.path().string(), "adam", {.load_optimizer_states = false});
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

TEST(CheckpointReload, InfinityInClientStateIsRefused) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    const test::ScratchFolder folder;
    CarriedNet model;
    auto [engine, optimizer, loader, schedule] = start(model.ptr(), carried_config(2, 1), communicator);
    const SaveOptions options = {.client_state = {{"best", std::numeric_limits<double>::infinity()}}};
    const auto save = [&, &e = *engine] { e.save_checkpoint(folder.path().string(), "t", options); };
    EXPECT_THAT(save, ThrowsMessage<UsageError>(HasSubstr("client_state")));
    EXPECT_FALSE(engine->load_checkpoint(folder.path().string()));
  });
}

// Weights alone do not say what is a buffer, and have a tied weight under each of its names.
TEST(CheckpointReload, AFileOfWeightsLoadsIntoAPlainModule) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    const test::ScratchFolder folder;
    CarriedNet model;
    auto [engine, optimizer, loader, schedule] = start(model.ptr(), carried_config(2, 1), communicator);
    const State trained = train_until(*engine, model, 3);
    const std::string path = engine->save_16bit_model(folder.path().string());
    CarriedNet plain;
    const auto source = checkpoint::open(path);
    checkpoint::load_module(*source, *plain);
    EXPECT_TRUE(torch::equal(plain->embed->weight, trained.at("embed.weight")));
    EXPECT_TRUE(torch::equal(plain->seen, model->seen));
  });
}

}  // namespace
}  // namespace ds::engine
