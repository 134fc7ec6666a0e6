// Engines without an optimizer: evaluation, and reference models beside one that is trained.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

nlohmann::ordered_json without_optimizer(nlohmann::ordered_json config) {
  config.erase("optimizer");
  return config;
}

class EvaluationEngines : public ::testing::TestWithParam<int> {
 protected:
  static nlohmann::ordered_json config() { return without_optimizer(small_config(GetParam(), 1)); }
};

TEST_P(EvaluationEngines, RunForward) {
  SmallNet plain;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto parts = start(model.ptr(), config(), communicator);
    EXPECT_EQ(parts.optimizer, nullptr);
    EXPECT_TRUE(parts.engine->get_lr().empty());
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = sample(i, communicator.rank());
      EXPECT_TRUE(model->forward(x).equal(plain->forward(x).detach()));
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(model->forward(x).equal(plain->forward(x)));
    }
    // What the inputs need goes through.
    const at::Tensor x = sample(0, communicator.rank()).requires_grad_();
    const at::Tensor same = sample(0, communicator.rank()).requires_grad_();
    model->loss(x).backward();
    plain->loss(same).backward();
    EXPECT_TRUE(x.grad().equal(same.grad()));
  });
}

TEST_P(EvaluationEngines, HaveNoGradientsAndNoStates) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    int64_t numel = 0;
    for (const at::Tensor& parameter : model->parameters()) numel += parameter.numel();
    const auto engine = start(model.ptr(), config(), communicator).engine;
    const auto bytes = engine->model_state_bytes();
    EXPECT_EQ(bytes.gradients, 0);
    EXPECT_EQ(bytes.optimizer, 0);
    EXPECT_EQ(bytes.master, 0);
    if (GetParam() < 3) EXPECT_EQ(bytes.parameters, 4 * numel);
    if (GetParam() == 3) EXPECT_LT(bytes.parameters, 4 * numel);
    EXPECT_THAT(to_table(engine->plan()), HasSubstr("none: forward only"));
    EXPECT_EQ(engine->plan().bytes->total(), engine->plan().bytes->parameters);
  });
}

TEST_P(EvaluationEngines, RefuseToTrain) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto engine = start(model.ptr(), config(), communicator).engine;
    const auto is_refused = AllOf(HasSubstr("this engine has no optimizer"), HasSubstr("section \"optimizer\""));
    EXPECT_THAT([&] { engine->backward(model->loss(sample(0, 0))); }, ThrowsMessage<UsageError>(is_refused));
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(is_refused));
    EXPECT_THAT([&] { engine->clip_grad_norm_(1.0); }, ThrowsMessage<UsageError>(is_refused));
    for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.requires_grad());
    engine.reset();
    for (const at::Tensor& parameter : model->parameters()) EXPECT_TRUE(parameter.requires_grad());
    if (GetParam() == 3) return;  // where they have gone with the engine
    EXPECT_EQ(train(*start(model.ptr(), small_config(GetParam(), 1), communicator).engine, model, 1).size(), 6U);
  });
}

TEST_P(EvaluationEngines, LoadWhatATrainingEngineSaved) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet trained;
    SmallNet model;
    const auto trainer = start(trained.ptr(), small_config(GetParam(), 1), communicator).engine;
    const State weights = train(*trainer, trained, 3);
    trainer->save_checkpoint(folder.path().string());
    const auto engine = start(model.ptr(), config(), communicator).engine;
    const LoadedCheckpoint loaded = engine->load_checkpoint(folder.path().string());
    ASSERT_TRUE(loaded);
    EXPECT_EQ(engine->global_steps(), 3);
    EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), weights), 0.0);
    engine->save_checkpoint(folder.path().string(), "evaluated");
    SmallNet again;
    const auto third = start(again.ptr(), config(), communicator).engine;
    EXPECT_TRUE(third->load_checkpoint(folder.path().string(), "evaluated"));
    EXPECT_EQ(largest_difference(copy_of(third->module_state_dict()), weights), 0.0);
    auto saving = config();
    saving["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
    SmallNet to_save;
    const auto writer = start(to_save.ptr(), saving, communicator).engine;
    EXPECT_TRUE(std::filesystem::exists(writer->save_16bit_model(folder.path().string())));
    // A checkpoint of it has no states to train on with.
    EXPECT_THAT([&] { trainer->load_checkpoint(folder.path().string(), "evaluated"); },
                ThrowsMessage<UsageError>(HasSubstr("no optimizer states")));
  });
}

// No step compares ranks that set weights by hand: the next save does, of which each rank writes a part.
TEST_P(EvaluationEngines, SayAtASaveThatRanksHaveOtherWeights) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto saving = config();
    saving["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = true;
    const auto engine = start(model.ptr(), saving, communicator).engine;
    const std::string path = folder.path().string();
    const auto multiply = [&](double factor) {
      const torch::NoGradGuard no_grad;
      model->first->weight.mul_(factor);
    };
    multiply(0.5);
    engine->save_checkpoint(path, "good");
    const State good = copy_of(engine->module_state_dict());
    const std::vector<std::function<void()>> saves = {
        [&] { engine->save_checkpoint(path, "bad"); }, [&] { engine->save_16bit_model(path); },
        [&] { engine->save_fp32_model(path); },
        [&] { engine->save_weights(path + "/some.safetensors", {.names = {"first.weight"}}); }};
    for (const auto& save : saves) {
      multiply(2.0 + communicator.rank());
      model->forward(sample(0, communicator.rank()));
      // Below stage 3 frozen parameters stay the program's, and are compared by their bits.
      EXPECT_THAT(save, ThrowsMessage<UsageError>(
                            GetParam() < 3 ? HasSubstr("of the data-parallel ranks, first.weight is not the same")
                                           : HasSubstr("rank 0: changed first.weight (values ")));
      EXPECT_THAT(save, ThrowsMessage<UsageError>(HasSubstr("a mixture; load a checkpoint")));
      engine->load_checkpoint(path, "good");
      EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), good), 0.0);
    }
    multiply(2.0);
    engine->save_checkpoint(path, "again");
    EXPECT_FALSE(std::filesystem::exists(folder / "bad"));
    EXPECT_TRUE(std::filesystem::exists(folder / "again"));
  });
}

// What no operator has written is found by the bits, where each rank has all of a parameter.
TEST_P(EvaluationEngines, CompareReplicasAtASave) {
  if (GetParam() == 3) return;  // each rank has other elements
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    if (communicator.rank() == 1) model->first->weight.data_ptr<float>()[0] += 1;
    EXPECT_THAT([&] { engine->save_checkpoint(folder.path().string()); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("check_replicas"), HasSubstr("first.weight"))));
  });
}

// A reward or a perceptual loss: the trained model's gradients go through the other one.
TEST_P(EvaluationEngines, StandBesideATrainedModel) {
  const auto loss_of = [](SmallNet& model, torch::nn::Linear& judge, const at::Tensor& x) {
    return judge->forward(model->forward(x)).pow(2).mean();
  };
  const auto make_judge = [] {
    torch::nn::Linear judge(3, 4);
    fill(*judge);
    return judge;
  };
  SmallNet plain;
  torch::nn::Linear plain_judge = make_judge();
  torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 2; ++rank) (loss_of(plain, plain_judge, sample(step, rank)) / 2).backward();
    optimizer.step();
  }
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    torch::nn::Linear judge = make_judge();
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto reference = start(judge.ptr(), config(), communicator).engine;
    for (int step = 0; step < 4; ++step) {
      engine->backward(loss_of(model, judge, sample(step, communicator.rank())));
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*plain)), 10 * kSameResult);
  });
}

TEST_P(EvaluationEngines, HaveThePrecisionOfTheirConfig) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_bf16(config()), communicator).engine;
    EXPECT_EQ(model->forward(sample(0, 0).to(torch::kBFloat16)).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(engine->model_state_bytes().master, 0);
  });
}

TEST_P(EvaluationEngines, HaveNoScheduleAndNoGroups) {
  SmallNet model;
  auto with_schedule = config();
  with_schedule["scheduler"] = {{"type", "WarmupLR"}, {"params", {{"warmup_max_lr", 0.1}}}};
  EXPECT_THAT([&] { initialize({.model = model.ptr(), .config = with_schedule}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("scheduler"), HasSubstr("without an optimizer"))));
  SmallNet other;
  EXPECT_THAT(
      [&] {
        initialize(
            {.model = other.ptr(), .config = config(), .parameter_groups = {{.parameters = {"first.*"}, .lr = 1.0}}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("parameter_groups")));
}

INSTANTIATE_TEST_SUITE_P(Stages, EvaluationEngines, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
