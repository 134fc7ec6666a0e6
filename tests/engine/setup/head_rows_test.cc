// per_head_muon: which weights, the same weights at every stage, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/split/layer_names.h"
#include "core/check.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct HeadsImpl : torch::nn::Module {
  HeadsImpl() {
    q_proj = register_module("q_proj", torch::nn::Linear(6, 12));
    qkv = register_module("qkv", torch::nn::Linear(12, 24));
    out = register_module("out", torch::nn::Linear(24, 3));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) {
    return (out(torch::tanh(qkv(torch::tanh(q_proj(x))))) - x.narrow(1, 0, 3)).pow(2).mean();
  }
  torch::nn::Linear q_proj{nullptr}, qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(Heads);

ordered_json heads_config(int stage, int64_t head_dim) {
  ordered_json config = small_config(stage, 1);
  config["optimizer"] = {{"type", "Muon"}, {"params", {{"lr", 0.02}}}};
  if (head_dim > 0) config["optimizer"]["params"].update({{"per_head_muon", true}, {"head_dim", head_dim}});
  return config;
}

State train_heads(const ordered_json& config, int ranks) {
  State result;
  test::run_ranks(ranks, [&](comm::Communicator& communicator) {
    Heads model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t step = 0; step < 4; ++step) {
      // All ranks have one batch, so that their number changes nothing.
      engine->backward(model->loss(sample(step, 0)));
      engine->step();
    }
    const State state = copy_of(engine->fp32_state_dict());
    if (communicator.rank() == 0) result = state;
  });
  return result;
}

TEST(PerHeadMuon, IsTheSameAtEveryStage) {
  const State expected = train_heads(heads_config(0, 4), 1);
  EXPECT_GT(largest_difference(train_heads(heads_config(0, 0), 1), expected), 1e-3);
  for (const int stage : {0, 1, 2, 3}) {
    EXPECT_LE(largest_difference(train_heads(heads_config(stage, 4), 3), expected), 2e-5) << stage;
  }
}

TEST(PerHeadMuon, KnowsWeightsByName) {
  for (const char* name : {"h.0.attn.q_proj.weight", "k_proj.weight", "l.self.value.weight", "wq.weight",
                           "h.0.attn.qkv.weight", "attn.in_proj_weight", "attn.k_proj_weight"}) {
    EXPECT_TRUE(makes_heads(name)) << name;
  }
  for (const char* name : {"h.0.attn.o_proj.weight", "h.0.attn.q_proj.bias", "attn.in_proj_bias", "mlp.dense.weight",
                           "attn.kv_b_proj.weight", "attn.c_attn.weight", "weight"}) {
    EXPECT_FALSE(makes_heads(name)) << name;
  }
}

TEST(PerHeadMuon, WhatDoesNotFitIsRefusedByName) {
  test::run_ranks(1, [](comm::Communicator& communicator) {
    Heads model;
    EXPECT_THAT(
        [&] { start(model.ptr(), heads_config(0, 5), communicator); },
        ::testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("q_proj.weight"), HasSubstr("5 rows, found 12"))));
    SmallNet other;
    EXPECT_THAT([&] { start(other.ptr(), heads_config(0, 4), communicator); },
                ::testing::ThrowsMessage<ConfigError>(HasSubstr("found none")));
  });
}

}  // namespace
}  // namespace ds::engine
