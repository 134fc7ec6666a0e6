// The chunked loss under the engine: the same training as with at::linear and at::cross_entropy_loss, in every stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/ops.h"
#include "tests/model/small_run.h"
#include "tests/ops/same_training.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

constexpr int64_t kVocabulary = 29;
constexpr int64_t kWidth = 6;
constexpr int kSteps = 4;

enum class Head { kTied, kOwn, kTwice };

struct TokenModel {
  Head head = Head::kTied;
  bool chunked = false;
  bool regions = false;  // the layer before and the loss itself are checkpointed
};

struct TokenNet : torch::nn::Module {
  explicit TokenNet(const TokenModel& model) : kind(model) {
    embedding = register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth));
    layer = register_module("layer", torch::nn::Linear(kWidth, kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    if (kind.head == Head::kOwn) head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
    fill(*this);
  }

  at::Tensor loss_of(const at::Tensor& x, const at::Tensor& targets) {
    const at::Tensor weight = head ? head->weight : embedding->weight;
    const at::Tensor bias = head ? head->bias : at::Tensor();
    if (kind.chunked) return ops::linear_cross_entropy(x, weight, bias, targets, {.chunk_rows = 3});
    const at::Tensor logits = at::linear(x, weight, bias).to(at::kFloat);
    return at::cross_entropy_loss(logits.view({-1, kVocabulary}), targets.reshape({-1}));
  }

  at::Tensor loss(const at::Tensor& tokens) {
    const at::Tensor x = embedding(tokens);
    const at::Tensor targets = (tokens * 5 + 3).remainder(kVocabulary);
    const auto body = [this](const at::Tensor& input) { return norm(input + torch::tanh(layer(input))); };
    const auto end = [this, targets](const at::Tensor& input) { return loss_of(input, targets); };
    if (kind.regions) return recompute::checkpoint(end, recompute::checkpoint(body, x));
    const at::Tensor hidden = body(x);
    if (kind.head == Head::kTwice) return end(hidden) + 0.25 * loss_of(x, tokens);
    return end(hidden);
  }

  TokenModel kind;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear layer{nullptr}, head{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};

at::Tensor tokens_of(int64_t micro_batch, int rank) {
  return at::arange(20, at::kLong).mul(7).add(11 * micro_batch + 5 * rank).remainder(kVocabulary).view({4, 5});
}

TrainedRun train_tokens(const ordered_json& config, comm::Communicator& communicator, const TokenModel& kind) {
  const auto model = std::make_shared<TokenNet>(kind);
  const auto engine = start(model, config, communicator).engine;
  return record_training(*engine, kSteps * engine->gradient_accumulation_steps(),
                         [&](int64_t micro) { return model->loss(tokens_of(micro, communicator.rank())); });
}

void expect_the_same_training(const ordered_json& config, TokenModel kind, double tolerance) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    kind.chunked = false;
    const TrainedRun plain = train_tokens(config, communicator, kind);
    kind.chunked = true;
    const TrainedRun chunked = train_tokens(config, communicator, kind);
    expect_same_training(chunked, plain, tolerance);
  });
}

// SGD: what differs in the last bits stays so, where Adam makes a step of any gradient.
ordered_json token_config(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.1}, {"momentum", 0.9}}}};
  config["zero_allow_untested_optimizer"] = true;
  return config;
}

TEST(LinearCrossEntropyInTheEngine, EveryStageWithEveryKindOfHead) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const Head head : {Head::kTied, Head::kOwn, Head::kTwice}) {
      SCOPED_TRACE(cat("stage ", stage, ", head ", static_cast<int>(head)));
      expect_the_same_training(token_config(stage, 2), {.head = head}, 2e-6);
    }
  }
}

TEST(LinearCrossEntropyInTheEngine, InRegionsThatAreComputedAgain) {
  for (const int stage : {0, 2, 3}) {
    for (const Head head : {Head::kTied, Head::kOwn}) {
      SCOPED_TRACE(cat("stage ", stage, ", head ", static_cast<int>(head)));
      expect_the_same_training(token_config(stage, 1), {.head = head, .regions = true}, 2e-6);
    }
  }
}

// The numbers of rows, and so of chunks, differ between ranks and micro-batches, and what stage 3 gathers has to be the
// same on all. Weight and bias are in buckets of their own: were each chunk a use of both, the layer before would be
// kept until backward on ranks with few chunks, and gathered again on others.
TEST(LinearCrossEntropyInTheEngine, RowsThatDifferBetweenRanks) {
  ordered_json config = token_config(3, 2);
  config["zero_optimization"]["stage3_max_reuse_distance"] = 600;
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto losses_of = [&](bool chunked) {
      const auto model = std::make_shared<TokenNet>(TokenModel{.head = Head::kOwn, .chunked = chunked});
      const auto engine = start(model, config, communicator).engine;
      std::vector<double> losses;
      for (int64_t micro = 0; micro < 2 * kSteps; ++micro) {
        const int64_t rows = 2 + (7 * micro + 5 * communicator.rank()) % 18;
        const at::Tensor loss = model->loss(tokens_of(micro, communicator.rank()).view(-1).narrow(0, 0, rows));
        engine->backward(loss);
        engine->step();
        losses.push_back(loss.item<double>());
      }
      return losses;
    };
    const std::vector<double> plain = losses_of(false);
    const std::vector<double> chunked = losses_of(true);
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(chunked[i], plain[i], 2e-6) << i;
  });
}

TEST(LinearCrossEntropyInTheEngine, SixteenBitsAndAutocast) {
  for (const int stage : {0, 2, 3}) {
    for (const char* section : {"bf16", "torch_autocast", "fp16"}) {
      SCOPED_TRACE(cat("stage ", stage, ", ", section));
      ordered_json config = token_config(stage, 2);
      config[section] = {{"enabled", true}};
      if (section == std::string("fp16")) config[section]["initial_scale_power"] = 16;
      expect_the_same_training(config, {.head = Head::kOwn}, 3e-2);
    }
  }
}

}  // namespace
}  // namespace ds::engine
