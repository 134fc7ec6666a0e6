// Options of a load, and models that differ from the saved one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/check.h"
#include "tests/model/checkpoint/checkpoint_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(CheckpointOptions, TheModuleAlone) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      CarriedNet model;
      const auto engine = start(model.ptr(), carried_config(stage, 2), communicator).engine;
      train_until(*engine, model, 4);
      const State saved = copy_of(engine->fp32_state_dict());
      engine->save_checkpoint(dir, "tag", {.client_state = {{"k", 1}}});
      CarriedNet other;
      forget(*other);
      const auto fresh = start(other.ptr(), carried_config(stage, 2), communicator).engine;
      one_step(*fresh, other);
      const double lr = fresh->get_lr()[0];
      const LoadedCheckpoint loaded = fresh->load_checkpoint(dir, "tag", {.load_module_only = true});
      EXPECT_EQ(loaded.client_state.at("k"), 1);
      EXPECT_EQ(fresh->global_steps(), 1);
      EXPECT_EQ(fresh->get_lr()[0], lr);
      EXPECT_EQ(fresh->optimizer()->step_count(), 1);
      EXPECT_EQ(largest_difference(copy_of(fresh->fp32_state_dict()), saved), 0.0);
      EXPECT_EQ(other->seen[0].item<double>(), 4.0);
      // The weights that operators see.
      EXPECT_EQ(other->loss(rows_of(0, 0, 2)).item<double>(), model->loss(rows_of(0, 0, 2)).item<double>());
    });
  }
}

TEST(CheckpointOptions, FreshOptimizerStates) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(1, 1), communicator).engine;
    train(*engine, model, 4);
    engine->save_checkpoint(dir, "tag");
    SmallNet other;
    const auto fresh = start(other.ptr(), small_config(2, 1), communicator).engine;
    fresh->load_checkpoint(dir, "tag", {.load_optimizer_states = false});
    EXPECT_EQ(fresh->optimizer()->step_count(), 0);
    EXPECT_EQ(fresh->global_steps(), 4);
    for (int64_t slice = 0; slice < fresh->optimizer()->slice_count(); ++slice) {
      for (const auto& [name, state] : fresh->optimizer()->states(slice)) {
        EXPECT_EQ(state.abs().sum().item<double>(), 0.0) << name;
      }
    }
    EXPECT_EQ(largest_difference(copy_of(fresh->fp32_state_dict()), copy_of(engine->fp32_state_dict())), 0.0);
  });
}

struct OtherNet : SmallNetImpl {
  explicit OtherNet(const std::string& change) {
    if (change == "renamed") {
      register_parameter("renamed", torch::ones({11}));
    } else if (change == "reshaped") {
      extra = register_parameter("extra", torch::ones({3, 4}));
    } else {
      extra = register_parameter("extra", torch::ones({4, 3}), /*requires_grad=*/change != "frozen");
    }
  }
  at::Tensor extra;
};

TEST(CheckpointOptions, ModelsThatDiffer) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(1, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<OtherNet>("");
    start(model, small_config(1, 1), communicator).engine->save_checkpoint(dir, "tag");
  });
  for (const int stage : {0, 1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto loads = [&](const std::shared_ptr<torch::nn::Module>& model, const LoadOptions& options) {
        const auto engine = start(model, small_config(stage, 1), communicator).engine;
        const State before = copy_of(engine->fp32_state_dict());
        std::string message;
        try {
          engine->load_checkpoint(dir, "tag", options);
        } catch (const UsageError& error) {
          message = error.what();
          EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
        }
        return message;
      };
      EXPECT_EQ(loads(std::make_shared<OtherNet>(""), {}), "");
      EXPECT_THAT(loads(std::make_shared<OtherNet>("renamed"), {}),
                  AllOf(HasSubstr("weights/renamed"), HasSubstr("weights/extra"), HasSubstr("load_module_strict")));
      EXPECT_THAT(loads(SmallNet().ptr(), {}), AllOf(HasSubstr("weights/extra"), HasSubstr("does not have")));
      EXPECT_EQ(loads(SmallNet().ptr(), {.load_module_strict = false}), "");
      EXPECT_EQ(loads(std::make_shared<OtherNet>("renamed"), {.load_module_strict = false}), "");
      EXPECT_THAT(loads(std::make_shared<OtherNet>("reshaped"), {.load_module_strict = false}),
                  AllOf(HasSubstr("weights/extra"), HasSubstr("[3, 4]"), HasSubstr("[4, 3]")));
      EXPECT_EQ(loads(std::make_shared<OtherNet>("frozen"), {}), "");  // its states are left
    });
  }
}

// A parameter that was not trained has no states to go on with.
TEST(CheckpointOptions, FrozenThereAndTrainedHere) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  run_ranks(2, [&](comm::Communicator& communicator) {
    start(std::make_shared<OtherNet>("frozen"), small_config(1, 1), communicator).engine->save_checkpoint(dir, "tag");
    const auto engine = start(std::make_shared<OtherNet>(""), small_config(1, 1), communicator).engine;
    EXPECT_THAT([&] { engine->load_checkpoint(dir, "tag"); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("extra"), HasSubstr("load_optimizer_states = false"))));
    EXPECT_TRUE(engine->load_checkpoint(dir, "tag", {.load_optimizer_states = false}));
  });
}

struct TiedPair : torch::nn::Module {
  explicit TiedPair(bool tie) {
    first = register_module("one", std::make_shared<torch::nn::Module>())
                ->register_parameter("weight", torch::zeros({6, 6}));
    second = register_module("two", std::make_shared<torch::nn::Module>())
                 ->register_parameter("weight", tie ? first : torch::zeros({6, 6}));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    return torch::matmul(torch::tanh(torch::matmul(x, first)), second).pow(2).mean();
  }
  at::Tensor first, second;
};

TEST(CheckpointOptions, TiedThereAndNotHere) {
  const test::ScratchFolder folder;
  const std::string dir = folder.path().string();
  for (const int stage : {1, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      const auto tied = std::make_shared<TiedPair>(true);
      const auto engine = start(tied, small_config(stage, 1), communicator).engine;
      engine->backward(tied->loss(sample(0, communicator.rank())));
      engine->step();
      engine->save_checkpoint(dir, "tied");
      const auto loose = std::make_shared<TiedPair>(false);
      const auto other = start(loose, small_config(stage, 1), communicator).engine;
      other->load_checkpoint(dir, "tied");
      const State weights = copy_of(other->fp32_state_dict());
      EXPECT_TRUE(torch::equal(weights.at("one.weight"), weights.at("two.weight")));
      EXPECT_TRUE(torch::equal(weights.at("one.weight"), copy_of(engine->fp32_state_dict()).at("one.weight")));
      other->backward(loose->loss(sample(1, communicator.rank())));  // now they differ
      other->step();
      other->save_checkpoint(dir, "loose");
      EXPECT_THAT([&] { engine->load_checkpoint(dir, "loose"); },
                  ThrowsMessage<UsageError>(HasSubstr("weights/two.weight")));
      EXPECT_TRUE(engine->load_checkpoint(dir, "loose", {.load_module_strict = false}));
    });
  }
}

}  // namespace
}  // namespace ds::engine
