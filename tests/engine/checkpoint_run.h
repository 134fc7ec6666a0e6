// A model with everything a checkpoint has to carry, trained on the same global batches whatever the number of ranks.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "comm/communicator.h"
#include "engine/engine.h"
#include "tests/engine/small_run.h"

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
    engine.backward(model->loss(rows_of(engine.global_steps(), engine.global_rank(), engine.world_size())));
    engine.step();
  }
  return copy_of(engine.fp32_state_dict());
}

}  // namespace ds::engine
