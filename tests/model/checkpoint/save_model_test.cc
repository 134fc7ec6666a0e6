// save_16bit_model: one file with whole weights, at every stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>

#include "core/check.h"
#include "core/files/safetensors.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Two names for one weight, a frozen one and a buffer.
struct TiedLinear : torch::nn::Module {
  explicit TiedLinear(const at::Tensor& shared)
      : weight(register_parameter("weight", shared)), bias(register_parameter("bias", torch::zeros({6}))) {}
  at::Tensor weight, bias;
};

struct SavedNetImpl : torch::nn::Module {
  SavedNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    tied = register_module("tied", std::make_shared<TiedLinear>(first->weight));
    tied->bias.set_requires_grad(false);
    scale = register_buffer("scale", torch::full({3}, 0.5));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(first->weight.scalar_type());
    return (torch::linear(torch::tanh(first(typed)), tied->weight, tied->bias) * scale.mean()).pow(2).mean();
  }
  torch::nn::Linear first{nullptr};
  std::shared_ptr<TiedLinear> tied;
  at::Tensor scale;
};
TORCH_MODULE(SavedNet);

ordered_json saving_config(int stage) {
  ordered_json config = small_config(stage, 1);
  config["bf16"]["enabled"] = true;
  config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
  return config;
}

class SaveModelTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, SaveModelTest, ::testing::Range(0, 4),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(SaveModelTest, TheFileHoldsWhatModuleStateDictSays) {
  const test::ScratchFolder folder;
  test::run_ranks(3, [&](comm::Communicator& communicator) {
    SavedNet model;
    const auto engine = start(model.ptr(), saving_config(GetParam()), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    const State expected = copy_of(engine->module_state_dict());
    const std::string path = engine->save_16bit_model(folder / "new/folder");
    const SafetensorsFile file(path);
    EXPECT_EQ(file.entries().size(), expected.size());
    EXPECT_TRUE(expected.contains("tied.weight") && expected.contains("scale"));
    for (const auto& [name, tensor] : expected) {
      EXPECT_TRUE(file.tensor(name).equal(tensor)) << name;
      if (name != "scale") EXPECT_EQ(file.tensor(name).scalar_type(), torch::kBFloat16);
    }
  });
}

TEST_P(SaveModelTest, FrozenParametersCanBeLeftOut) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavedNet model;
    const auto engine = start(model.ptr(), saving_config(GetParam()), communicator).engine;
    const SafetensorsFile file(engine->save_16bit_model(folder.path(), "some.safetensors", true));
    EXPECT_FALSE(file.contains("tied.bias"));
    EXPECT_EQ(file.entries().size(), 4);
  });
}

TEST_P(SaveModelTest, AFileThatCannotBeWrittenIsAnErrorOnEveryRank) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavedNet model;
    const auto engine = start(model.ptr(), saving_config(GetParam()), communicator).engine;
    EXPECT_THROW(engine->save_16bit_model("/proc/nowhere"), IoError);
    engine->backward(model->loss(sample(0, communicator.rank())));  // and training goes on
    engine->step();
  });
}

// Averaged weights, say, under one name each; only rank 0 has them, and nothing is gathered.
TEST_P(SaveModelTest, ValuesOfTheProgramTakeThePlaceOfTheModels) {
  const test::ScratchFolder folder;
  ordered_json config = saving_config(GetParam());
  config["zero_optimization"].erase("stage3_gather_16bit_weights_on_model_save");
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const State own = copy_of(engine->fp32_state_dict());
    std::optional<StateDict> from;
    if (communicator.rank() == 0) {
      from = StateDict{{"first.weight", torch::full({6, 6}, 1.0 / 3)},
                       {"first.bias", torch::ones({6})},
                       {"tied.bias", torch::zeros({6}, torch::kDouble)}};
    }
    const SafetensorsFile file(engine->save_16bit_model(folder.path(), "averaged.safetensors", false, from));
    EXPECT_EQ(file.entries().size(), 5U);
    for (const char* name : {"first.weight", "tied.weight"}) {
      EXPECT_TRUE(file.tensor(name).equal(torch::full({6, 6}, 1.0 / 3, torch::kBFloat16))) << name;
    }
    EXPECT_TRUE(file.tensor("scale").equal(torch::full({3}, 0.5, file.tensor("scale").scalar_type())));
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), own), 0.0);
  });
}

TEST_P(SaveModelTest, ValuesOfTheProgramThatDoNotFitAreNamed) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavedNet model;
    const auto engine = start(model.ptr(), saving_config(GetParam()), communicator).engine;
    const StateDict all = engine->module_state_dict();
    const auto expect_refused = [&](const StateDict& from, const char* text) {
      const auto save = [&] { engine->save_16bit_model(folder.path(), "never.safetensors", false, from); };
      if (communicator.rank() == 0) {
        EXPECT_THAT(save, ThrowsMessage<UsageError>(HasSubstr(text)));
      } else {
        EXPECT_THAT(save, ThrowsMessage<IoError>(HasSubstr("rank 0 could not write")));
      }
    };
    StateDict other = all;
    other.emplace_back("more.weight", torch::ones({1}));
    expect_refused(other, "from: more.weight: expected names of the model's parameters");
    other = all;
    other.front().second = torch::ones({5});
    expect_refused(other, "expected a tensor of shape [6, 6]");
    expect_refused({{"first.weight", torch::ones({6, 6})}}, "all 3 parameters that the file gets, found none of 2");
    expect_refused({}, "found none of 3");
    EXPECT_FALSE(std::filesystem::exists(folder / "never.safetensors"));
  });
}

TEST(SaveModel, Stage3NeedsItsKey) {
  ordered_json config = saving_config(3);
  config["zero_optimization"].erase("stage3_gather_16bit_weights_on_model_save");
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SavedNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_THAT([&] { engine->save_16bit_model("/tmp"); },
                ThrowsMessage<UsageError>(HasSubstr("stage3_gather_16bit_weights_on_model_save: true")));
  });
}

}  // namespace
}  // namespace ds::engine
