// Programs as users of LibTorch write them, each as a plain loop over the global batch and as the same loop on the
// engine. Values and data come from generators of their own: ranks that are threads share torch's.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dsengine/comm.h"

namespace ds::engine {

constexpr int kProgramSteps = 12;
// Samples of a step on all ranks, so that 1, 2 and 4 ranks see the same global batch.
constexpr int kGlobalBatch = 8;

using Losses = std::vector<double>;
using Config = nlohmann::ordered_json;

struct Program {
  std::string name;
  // Relative, of each loss.
  double tolerance = 1e-6;
  // The losses of the global batches; of several a step in turn.
  std::function<Losses(int world)> train_plainly;
  // Those of this rank's part. `zero`: the section zero_optimization.
  std::function<Losses(comm::Communicator&, const Config& zero)> train_on_engine;
  // Returns the config of its engine on so many ranks; null: that of adamw_config().
  std::function<Config(int ranks, const Config& zero)> config = {};
  // Each step is one global batch, which the ranks cut; false: micro-batches are numbered over ranks and steps.
  bool cuts_global_batches = true;
};

// Returns the programs below, all of them.
const std::vector<Program>& all_programs();

Program residual_cnn();
Program packed_lstm();
Program dcgan();
Program wgan_gp();
Program pinn();
Program policy_gradient();
// Those that are written once (trainer.h).
std::vector<Program> carried_programs();
std::vector<Program> dynamics_programs();
std::vector<Program> inner_loop_programs();
std::vector<Program> methods_programs();
std::vector<Program> text_programs();
std::vector<Program> vision_programs();

// The CNN with BatchNorm, whose batch is that of a rank. `reordered` > 0: ranks' batches and the samples in each come
// in another order, by that number.
Losses train_batch_norm_plainly(int world, int reordered);
Losses train_batch_norm_on_engine(comm::Communicator& communicator, const Config& zero);

inline at::Generator generator_of(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// As small as fan-in asks for; scales and offsets of norms stay 1 and 0.
inline void draw_weights(torch::nn::Module& module, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = generator_of(seed);
  for (at::Tensor& parameter : module.parameters()) {
    if (parameter.dim() < 2) continue;
    const double fan_in = static_cast<double>(parameter.numel()) / static_cast<double>(parameter.size(0));
    const at::Tensor drawn = torch::randn(parameter.sizes(), generator, torch::kDouble);
    parameter.copy_(drawn / std::sqrt(fan_in));
  }
  for (const auto& item : module.named_parameters()) {  // LibTorch draws biases too
    if (item.value().dim() == 1 && item.key().find("norm") == std::string::npos) item.value().zero_();
  }
}

// The part of a global batch that a rank has.
inline at::Tensor part_of(const at::Tensor& batch, comm::Communicator& ranks) {
  return batch.chunk(ranks.size())[static_cast<size_t>(ranks.rank())];
}

inline Config adamw_config(const Config& zero, int accumulation = 1) {
  return {{"train_micro_batch_size_per_gpu", 1},  // of the engine's own loader, which these programs do not use
          {"gradient_accumulation_steps", accumulation},
          {"gradient_clipping", 0.0},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-3}, {"weight_decay", 0.01}}}}},
          {"zero_optimization", zero}};
}

inline torch::optim::AdamWOptions adamw_options() { return torch::optim::AdamWOptions(1e-3).weight_decay(0.01); }

}  // namespace ds::engine
