// The example's GPT, trained by engines whose ranks have parts of its layers, and by plain torch in one process.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsengine/engine.h"
#include "examples/gpt/gpt_init.h"
#include "examples/gpt/gpt_model.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {

inline gpt::GptConfig small_gpt(bool tied = false) {
  return {.layers = 2, .hidden = 32, .heads = 4, .seq_len = 16, .vocab = 50, .tie_embeddings = tied};
}

// 50 entries over 4 ranks are 13, 13, 12 and 12.
inline std::vector<parallel::SplitRule> gpt_rules(const gpt::GptConfig& config) {
  using enum parallel::Style;
  const int64_t h = config.hidden;
  return {{".*attn\\.qkv", kColumn, {h, h, h}},
          {".*attn\\.proj", kRow},
          {".*mlp\\.fc", kColumn},
          {".*mlp\\.proj", kRow},
          {config.tie_embeddings ? "wte" : "wte|head", kVocabulary}};
}

struct GptBatch {
  at::Tensor tokens, targets;
  GptBatch to(at::Device device) const { return {tokens.to(device), targets.to(device)}; }
};

// Of formulas: torch's global generator is shared by ranks that are threads.
inline GptBatch gpt_batch(int64_t micro_batch, int data_rank, const gpt::GptConfig& config) {
  const int64_t rows = 2;
  const at::Tensor numbers = at::arange(rows * (config.seq_len + 1), at::kLong) * 7 + micro_batch * 13 + data_rank * 29;
  const at::Tensor text = numbers.square().remainder(config.vocab).view({rows, config.seq_len + 1});
  return {text.slice(1, 0, config.seq_len).contiguous(), text.slice(1, 1).contiguous()};
}

struct Curve {
  std::vector<double> losses, norms;
};

struct GptRun {
  int tensor = 2;
  int data = 1;
  int stage = 0;
  int steps = 10;
  int accumulation = 1;
  gpt::GptConfig model = small_gpt();
  nlohmann::json more = nlohmann::json::object();  // merged into the ds_config
  bool float64 = false;
  std::string device = "";  // empty: the CPU

  nlohmann::json config() const {
    nlohmann::json zero = {{"stage", stage}, {"reduce_bucket_size", 5000}};
    if (stage == 3) zero["stage3_param_persistence_threshold"] = 40;
    nlohmann::json result = {{"train_micro_batch_size_per_gpu", 2},
                             {"gradient_accumulation_steps", accumulation},
                             {"gradient_clipping", 0.5},
                             {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 2e-3}, {"weight_decay", 0.01}}}}},
                             {"zero_optimization", zero},
                             {"tensor_parallel", {{"autotp_size", tensor}}},
                             {"check_replicas", 1},
                             {"log_level", "warning"}};
    result.merge_patch(more);
    return result;
  }

  std::shared_ptr<gpt::Gpt> make() const {
    auto result = std::make_shared<gpt::Gpt>(model);
    gpt::initialize_weights(*result, 3);
    if (float64) result->to(at::kDouble);
    return result;
  }

  // Plain torch on all batches of a step.
  Curve plain(double clip = 0.5) const {
    const auto net = make();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
    Curve curve;
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      double sum = 0;
      for (int micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
        for (int rank = 0; rank < data; ++rank) {
          const GptBatch batch = gpt_batch(micro, rank, model);
          const at::Tensor loss = net->forward(batch.tokens, batch.targets) / static_cast<double>(data * accumulation);
          loss.backward();
          sum += loss.item<double>();
        }
      }
      curve.losses.push_back(sum);
      curve.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), clip));
      optimizer.step();
    }
    return curve;
  }

  Initialized start(comm::Communicator& world, const std::shared_ptr<torch::nn::Module>& net) const {
    return initialize({.model = net,
                       .config = config(),
                       .split = gpt_rules(model),
                       .communicator = {std::shared_ptr<void>(), &world},
                       .device = device,
                       .seed_generators = false});
  }

  // One engine's training; what all ranks report is compared by `check` on each.
  Curve train(Engine& engine, gpt::Gpt& net) const {
    Curve curve;
    for (int step = 0; step < steps; ++step) {
      double sum = 0;
      for (int micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
        const GptBatch batch = gpt_batch(micro, engine.communicator().rank(), model).to(engine.device());
        const at::Tensor loss = net.forward(batch.tokens, batch.targets);
        sum += engine.backward(loss).item<double>();
        engine.step();
      }
      at::Tensor mean =
          at::full({1}, sum / engine.dp_world_size(), at::TensorOptions(engine.device()).dtype(at::kDouble));
      if (engine.dp_world_size() > 1) engine.communicator().all_reduce(mean).wait();
      curve.losses.push_back(mean.item<double>());
      curve.norms.push_back(engine.get_global_grad_norm().value_or(-1));
    }
    return curve;
  }

  int world() const { return tensor * data; }
};

// Losses absolutely, norms relatively.
inline void expect_same(const Curve& found, const Curve& expected, double losses, double norms) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], losses) << "loss of step " << i;
    EXPECT_NEAR(found.norms[i], expected.norms[i], norms * std::max(1.0, expected.norms[i])) << "norm of step " << i;
  }
}

// On threads.
inline void expect_same_as_plain(const GptRun& run, double losses = 5e-6, double norms = 2e-5) {
  const Curve expected = run.plain();
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto [engine, optimizer, loader, schedule] = run.start(world, net);
    EXPECT_EQ(engine->dp_world_size(), run.data);
    EXPECT_EQ(engine->mp_world_size(), run.tensor);
    const Curve found = run.train(*engine, *net);
    expect_same(found, expected, losses, norms);
    EXPECT_TRUE(engine->joined_operators().empty());
  });
}

// Against one process and the same precision.
inline Curve of_one_rank(GptRun run) {
  run.tensor = 1;
  Curve curve;
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const Curve own = run.train(*engine, *net);
    if (world.rank() == 0) curve = own;
  });
  return curve;
}

inline void expect_same_as_one_rank(const GptRun& run, double losses, double norms) {
  const Curve expected = of_one_rank(run);
  test::run_ranks(run.world(), [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    expect_same(run.train(*engine, *net), expected, losses, norms);
  });
}

}  // namespace ds::engine
