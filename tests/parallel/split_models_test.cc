// Models of which each rank has a part, against the same models on one rank: losses, gradients, no joined operator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dsengine/activation_checkpoint.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/parallel/encoder_layer.h"
#include "tests/parallel/llama.h"
#include "tests/parallel/split_ranks.h"

namespace ds::parallel {
namespace {

using enum Style;

constexpr int64_t kVocabularySize = 96;

struct Batch {
  at::Tensor tokens, targets;
};

Batch batch_of(int64_t sequences, int64_t time) {
  torch::manual_seed(7);
  return {.tokens = at::randint(kVocabularySize, {sequences, time}, at::kLong),
          .targets = at::randint(kVocabularySize, {sequences, time}, at::kLong)};
}

gpt::GptConfig small_gpt(bool tied) {
  return {.layers = 2, .hidden = 64, .heads = 4, .seq_len = 32, .vocab = kVocabularySize, .tie_embeddings = tied};
}

std::function<std::shared_ptr<gpt::Gpt>()> gpt_maker(const gpt::GptConfig& config) {
  return [config] {
    auto model = std::make_shared<gpt::Gpt>(config);
    gpt::initialize_weights(*model, 3);
    return model;
  };
}

std::vector<SplitRule> gpt_rules(int64_t hidden, bool tied) {
  return {{.pattern = ".*qkv", .style = kColumn, .blocks = {hidden, hidden, hidden}},
          {.pattern = ".*attn.proj", .style = kRow},
          {.pattern = ".*fc", .style = kColumn},
          {.pattern = ".*mlp.proj", .style = kRow},
          {.pattern = tied ? "wte" : "wte|head", .style = kVocabulary}};
}

void expect_gpt(const gpt::GptConfig& config, int ranks, const std::vector<SplitRule>& rules, bool joins = false) {
  const Batch batch = batch_of(2, 32);
  expect_same_as_whole<gpt::Gpt>(gpt_maker(config),
                                 [&](gpt::Gpt& model) { return model.forward(batch.tokens, batch.targets); },
                                 {.ranks = ranks, .rules = rules, .joins = joins});
}

TEST(SplitModels, GptOverTwoRanks) { expect_gpt(small_gpt(false), 2, gpt_rules(64, false)); }
TEST(SplitModels, GptWithWholeLogits) {
  gpt::GptConfig config = small_gpt(false);
  config.whole_logits = true;
  expect_gpt(config, 2, gpt_rules(64, false));
}
TEST(SplitModels, GptWithFusedNorms) {
  gpt::GptConfig config = small_gpt(false);
  config.fused_norms = true;
  expect_gpt(config, 2, gpt_rules(64, false));
}
TEST(SplitModels, GptOverFourRanks) { expect_gpt(small_gpt(false), 4, gpt_rules(64, false)); }
TEST(SplitModels, GptWithATiedVocabulary) {
  expect_gpt(small_gpt(true), 2, gpt_rules(64, true));
  expect_gpt(small_gpt(true), 4, gpt_rules(64, true));
}
TEST(SplitModels, GptOverOneRankIsThePlainModel) { expect_gpt(small_gpt(false), 1, gpt_rules(64, false)); }

TEST(SplitModels, GptWithUnevenHeadsAndVocabulary) {
  gpt::GptConfig config = small_gpt(false);
  config.hidden = 56;
  config.heads = 7;
  std::vector<SplitRule> rules = gpt_rules(56, false);
  rules[0].grain = rules[1].grain = 8;  // whole heads: 3, 2 and 2
  config.vocab = kVocabularySize + 1;   // 33, 32 and 32
  expect_gpt(config, 3, rules);
}

TEST(SplitModels, GptWithASenselessPlanIsRight) {
  expect_gpt(small_gpt(false), 2,
             {{.pattern = ".*qkv", .style = kColumn},
              {.pattern = ".*attn.proj", .style = kColumn},
              {.pattern = ".*fc.weight", .style = kRow},
              {.pattern = ".*mlp.proj.weight", .style = kRow},
              {.pattern = "wpe", .style = kRow},
              {.pattern = ".*ln1.weight", .style = kColumn}},
             true);
}

TEST(SplitModels, GptWithActivationCheckpointing) {
  gpt::GptConfig config = small_gpt(false);
  config.activation_checkpointing = true;
  expect_gpt(config, 2, gpt_rules(64, false));
}

// Two regions, run again one after the other, read a tensor that is no input of theirs: what the first one has
// converted must not lead the gradient of the second one astray.
struct SharedMemory : torch::nn::Module {
  SharedMemory() {
    source = register_module("source", torch::nn::Linear(8, 8));
    first = register_module("first", torch::nn::Linear(8, 6));
    second = register_module("second", torch::nn::Linear(8, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor memory = source(x).tanh();
    const at::Tensor one = at::ones({1}).requires_grad_();
    const auto region = [&](torch::nn::Linear& layer) {
      return recompute::checkpoint([memory, layer](const at::Tensor& y) mutable { return layer(memory).sum() * y; },
                                   one);
    };
    return (region(first) + region(second) * 2).sum();
  }
  torch::nn::Linear source{nullptr}, first{nullptr}, second{nullptr};
};

TEST(SplitModels, RegionsThatReadOneTensorFromOutside) {
  const at::Tensor x = at::arange(24, at::kFloat).view({3, 8}).sin();
  expect_same_as_whole<SharedMemory>([] { return std::make_shared<SharedMemory>(); },
                                     [&](SharedMemory& model) { return model.forward(x); },
                                     {.ranks = 2, .rules = {{.pattern = "first|second", .style = kColumn}}});
}

std::vector<SplitRule> llama_rules() {
  return {{.pattern = ".*[qkv]_proj", .style = kColumn},
          {.pattern = ".*o_proj", .style = kRow},
          {.pattern = ".*(gate|up)_proj", .style = kColumn},
          {.pattern = ".*down_proj", .style = kRow},
          {.pattern = "embed_tokens|lm_head", .style = kVocabulary}};
}

TEST(SplitModels, Llama) {
  const Batch batch = batch_of(2, 24);
  for (const int ranks : {2, 4}) {
    expect_same_as_whole<Llama>([] { return std::make_shared<Llama>(); },
                                [&](Llama& model) { return model.forward(batch.tokens, batch.targets); },
                                {.ranks = ranks, .rules = llama_rules(), .tolerance = 3e-6});
    // In double precision the order of additions shows no more.
    expect_same_as_whole<Llama>(
        [] {
          auto model = std::make_shared<Llama>();
          model->to(at::kDouble);
          return model;
        },
        [&](Llama& model) { return model.forward(batch.tokens, batch.targets); },
        {.ranks = ranks, .rules = llama_rules(), .tolerance = 1e-12});
  }
}

TEST(SplitModels, TransformerEncoderLayer) {
  torch::manual_seed(5);
  const at::Tensor x = at::randn({10, 3, 64});
  for (const int ranks : {2, 4}) {
    expect_same_as_whole<EncoderLayer>(new_encoder_layer,
                                       [&](EncoderLayer& layer) { return (layer.forward(x) * x).sum(); },
                                       {.ranks = ranks, .rules = rules_of_encoder_layer()});
  }
}

struct AttentionAlone : torch::nn::Module {
  AttentionAlone() {
    attention = register_module(
        "attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(32, 4).kdim(16).vdim(16)));
  }
  torch::nn::MultiheadAttention attention{nullptr};
};

TEST(SplitModels, MultiheadAttentionWithSeparateWeightsAndItsAverages) {
  torch::manual_seed(5);
  const at::Tensor query = at::randn({6, 3, 32});
  const at::Tensor key = at::randn({7, 3, 16});
  const at::Tensor value = at::randn({7, 3, 16});
  expect_same_as_whole<AttentionAlone>(
      [] { return std::make_shared<AttentionAlone>(); },
      [&](AttentionAlone& model) {
        const auto [mixed, weights] = model.attention(query, key, value);
        return (mixed * query).sum() + weights.pow(2).sum();
      },
      {.ranks = 2,
       .rules = {{.pattern = ".*[qkv]_proj_weight", .style = kColumn},
                 {.pattern = ".*in_proj_bias", .style = kColumn, .blocks = {32, 32, 32}},
                 {.pattern = ".*out_proj", .style = kRow}}});
}

}  // namespace
}  // namespace ds::parallel
