// A model with everything a checkpoint has to carry, trained on the same global batches whatever the number of ranks.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/folder_source.h"
#include "checkpoint/source/training_state.h"
#include "dsengine/comm.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"

namespace ds::engine {

// A tied weight, a frozen parameter, a buffer, and sizes that no number of ranks divides.
struct CarriedNetImpl : torch::nn::Module {
  CarriedNetImpl() {
    embed = register_module("embed", torch::nn::Linear(torch::nn::LinearOptions(7, 13).bias(false)));
    middle = register_module("middle", torch::nn::Linear(13, 13));
    frozen = register_parameter("frozen", torch::zeros({13}));
    scale = register_parameter("scale", torch::zeros({}));
    tied = register_module("tied", std::make_shared<torch::nn::Module>());
    tied->register_parameter("weight", embed->weight);
    seen = register_buffer("seen", torch::zeros({2}, torch::kDouble));
    fill(*this);
    frozen.set_requires_grad(false);
  }
  at::Tensor loss(const at::Tensor& x) {
    seen[0] += 1;
    const at::Tensor typed = x.to(embed->weight.scalar_type());
    const at::Tensor hidden = torch::tanh(middle(torch::tanh(embed(typed))) + frozen * (scale + 1));
    return (torch::matmul(hidden, embed->weight) - typed.sin()).pow(2).mean();
  }

  torch::nn::Linear embed{nullptr}, middle{nullptr};
  std::shared_ptr<torch::nn::Module> tied;
  at::Tensor frozen, scale, seen;
};
TORCH_MODULE(CarriedNet);

inline constexpr int64_t kGlobalBatch = 12;

// Rows of optimizer step `step` that rank `rank` of `world` sees: [12 / world, 7].
inline at::Tensor rows_of(int64_t step, int rank, int world) {
  const int64_t count = kGlobalBatch * 7;
  const at::Tensor numbers = torch::arange(count, torch::kDouble) * 1.3 + static_cast<double>(29 * step);
  return torch::cos(numbers).view({kGlobalBatch, 7}).to(torch::kFloat).chunk(world, 0)[static_cast<size_t>(rank)];
}

inline nlohmann::ordered_json carried_config(int stage, int world) {
  nlohmann::ordered_json config = small_config(stage, 1);
  config["train_micro_batch_size_per_gpu"] = kGlobalBatch / world;
  config["gradient_clipping"] = 0.5;
  config["scheduler"] = {{"type", "WarmupDecayLR"},
                         {"params", {{"total_num_steps", 30}, {"warmup_num_steps", 5}, {"warmup_max_lr", 0.02}}}};
  return config;
}

// Trains until `steps` optimizer steps are done in all. Returns the float32 weights.
inline State train_until(Engine& engine, CarriedNet& model, int64_t steps) {
  while (engine.global_steps() < steps) {
    engine.backward(model->loss(rows_of(engine.global_steps(), engine.communicator().rank(), engine.dp_world_size())));
    engine.step();
  }
  return copy_of(engine.fp32_state_dict());
}

// So that what is there after a load has come from the checkpoint.
inline void forget(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) parameter.fill_(0.125);
}

// In float16 `overflow` makes it a step that is skipped.
inline void one_step(Engine& engine, CarriedNet& model, bool overflow = false) {
  const int64_t step = engine.global_steps();
  for (int64_t micro = 0; micro < engine.gradient_accumulation_steps(); ++micro) {
    at::Tensor loss = model->loss(rows_of(step * 8 + micro, engine.global_rank(), engine.world_size()));
    if (overflow && engine.global_rank() == engine.world_size() - 1) {
      loss = loss * std::numeric_limits<float>::infinity();
    }
    engine.backward(loss);
    engine.step();
  }
}

// Weights and states.
inline void expect_same_state(const std::string& one, const std::string& other, bool frozen_too = true) {
  const auto a = checkpoint::open_folder(one);
  const auto b = checkpoint::open_folder(other);
  int compared = 0;
  for (const auto& [path, info] : a->tensors()) {
    if (path.starts_with("ranks/") || (info.frozen && !frozen_too)) continue;
    ASSERT_TRUE(b->contains(path)) << path;
    EXPECT_EQ(info, b->info(path)) << path;
    EXPECT_TRUE(torch::equal(a->tensor(path), b->tensor(path))) << path;
    ++compared;
  }
  EXPECT_GT(compared, 4);
  for (const auto& [path, info] : b->tensors()) EXPECT_TRUE(path.starts_with("ranks/") || a->contains(path)) << path;
  EXPECT_EQ(a->aliases(), b->aliases());
  const checkpoint::TrainingState& s = a->state();
  const checkpoint::TrainingState& t = b->state();
  EXPECT_EQ(s.global_steps, t.global_steps);
  EXPECT_EQ(s.global_samples, t.global_samples);
  EXPECT_EQ(s.skipped_steps, t.skipped_steps);
  EXPECT_EQ(s.optimizer->step_count, t.optimizer->step_count);
  EXPECT_EQ(s.optimizer->groups, t.optimizer->groups);
  EXPECT_EQ(s.lr_iteration, t.lr_iteration);
  if (s.loss_scaler && t.loss_scaler) EXPECT_EQ(*s.loss_scaler, *t.loss_scaler);
}

}  // namespace ds::engine
