// Goes on from checkpoints that DeepSpeed wrote, beside DeepSpeed: tests/checkpoint/deepspeed_fixtures.py has the net,
// the batches, and the losses of its own ten steps after the save.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsengine/engine.h"
#include "dsengine/optimizer.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

constexpr int64_t kVocabulary = 11, kWidth = 6, kInner = 13, kSequences = 6, kLength = 5;
const std::string kFixtureFolder = std::string(DS_SOURCE_DIR) + "/tests/checkpoint/deepspeed_fixtures/";

// Net of the script, with other values: all of them have to come from the checkpoint.
struct ResumedNetImpl : torch::nn::Module {
  ResumedNetImpl() {
    shift = register_parameter("shift", torch::zeros({1, kInner}));
    embed = register_module("embed", torch::nn::Embedding(kVocabulary, kWidth));
    inner = register_module("inner", torch::nn::Linear(kWidth, kInner));
    out = register_module("out", torch::nn::Linear(kInner, kWidth));
    head = register_module("head", std::make_shared<torch::nn::Module>());
    head->register_parameter("weight", embed->weight);
    gain = register_buffer("gain", torch::zeros({kVocabulary}));
    calls = register_buffer("calls", torch::zeros({}, torch::kLong));
    fill(*this);
    shift.set_requires_grad(false);
  }
  at::Tensor loss(const at::Tensor& tokens) {
    const at::Tensor read = tokens.narrow(1, 0, kLength);
    const at::Tensor target = tokens.narrow(1, 1, kLength).reshape({-1});
    const at::Tensor hidden = out(torch::tanh(inner(embed(read)) + shift));
    const at::Tensor logits = torch::matmul(hidden, embed->weight.t()) + gain;
    return torch::nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), target);
  }

  at::Tensor shift, gain, calls;
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear inner{nullptr}, out{nullptr};
  std::shared_ptr<torch::nn::Module> head;
};
TORCH_MODULE(ResumedNet);

// [6 / world, 6] tokens of step `step`.
at::Tensor token_rows(int64_t step, int rank, int world) {
  const int64_t share = kSequences / world;
  at::Tensor rows = torch::empty({share, kLength + 1}, torch::kLong);
  for (int64_t row = 0; row < share; ++row) {
    const int64_t i = rank * share + row;
    for (int64_t t = 0; t <= kLength; ++t) rows[row][t] = (3 * step + 5 * i + t * (t + i)) % kVocabulary;
  }
  return rows;
}

struct Resumption {
  const char* from;  // the fixture
  int world;
  int stage;
};

nlohmann::ordered_json config_of(const Resumption& resumption) {
  nlohmann::ordered_json config = small_config(resumption.stage, 1);
  config["train_micro_batch_size_per_gpu"] = kSequences / resumption.world;
  config["optimizer"]["params"] = {
      {"lr", 0.01}, {"betas", {0.9, 0.99}}, {"eps", 1e-7}, {"weight_decay", 0.1}, {"torch_adam", true}};
  if (std::string(resumption.from) == "stage1_fp32") {
    config["scheduler"] = {
        {"type", "WarmupLR"},
        {"params",
         {{"warmup_min_lr", 0.001}, {"warmup_max_lr", 0.01}, {"warmup_num_steps", 8}, {"warmup_type", "linear"}}}};
  }
  if (std::string(resumption.from) == "stage0_plateau") {
    config["scheduler"] = {{"type", "ReduceLROnPlateau"},
                           {"params", {{"factor", 0.5}, {"patience", 5}, {"threshold", 0.5}}}};
  }
  config.erase("gradient_clipping");  // DeepSpeed's default, as in the script
  return config;
}

class DeepspeedResume : public testing::TestWithParam<Resumption> {};

TEST_P(DeepspeedResume, LossesAreThoseOfDeepspeed) {
  const Resumption& resumption = GetParam();
  const auto expected = nlohmann::json::parse(std::ifstream(kFixtureFolder + resumption.from + "/expected.json"));
  const auto wanted = expected["loss"].get<std::vector<double>>();
  ASSERT_EQ(wanted.size(), 10);
  std::vector<std::vector<double>> losses(static_cast<size_t>(resumption.world));
  test::run_ranks(resumption.world, [&](comm::Communicator& communicator) {
    ResumedNet model;
    auto started = initialize({.model = model.ptr(),
                               .config = config_of(resumption),
                               .parameter_groups = {{.parameters = {"*.bias"}, .lr = 0.004, .weight_decay = 0.0}},
                               .communicator = borrowed(communicator)});
    Engine& engine = *started.engine;
    const LoadedCheckpoint loaded = engine.load_checkpoint(kFixtureFolder + resumption.from, "saved");
    EXPECT_TRUE(loaded);
    EXPECT_EQ(loaded.client_state["note"], "a program's own");
    EXPECT_EQ(engine.global_steps(), expected["global_steps"]);
    EXPECT_EQ(model->calls.item<int64_t>(), 7) << "a buffer";
    for (size_t step = 0; step < wanted.size(); ++step) {
      const at::Tensor loss = model->loss(token_rows(engine.global_steps(), engine.global_rank(), engine.world_size()));
      losses[static_cast<size_t>(engine.global_rank())].push_back(loss.item<double>());
      engine.backward(loss);
      engine.step();
      if (started.schedule && started.schedule->plateau()) started.schedule->step(loss.item<double>());
    }
  });
  for (size_t step = 0; step < wanted.size(); ++step) {
    double mean = 0.0;
    for (const std::vector<double>& of_rank : losses) mean += of_rank.at(step) / resumption.world;
    EXPECT_NEAR(mean, wanted[step], 5e-6) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, DeepspeedResume,
                         testing::Values(Resumption{"stage0_fp32", 2, 0}, Resumption{"stage0_plateau", 2, 0},
                                         Resumption{"stage0_plateau", 1, 3}, Resumption{"stage1_fp32", 2, 1},
                                         Resumption{"stage2_fp32", 3, 2}, Resumption{"stage3_fp32", 2, 3},
                                         Resumption{"stage3_fp32", 3, 1}, Resumption{"stage1_fp32", 1, 3},
                                         Resumption{"stage2_fp32", 2, 3}),
                         [](const auto& test_case) {
                           return std::string(test_case.param.from) + "_on_" + std::to_string(test_case.param.world) +
                                  "_ranks_stage" + std::to_string(test_case.param.stage);
                         });

}  // namespace
}  // namespace ds::engine
