// A small network, its data, and the same training done by the engine and by plain torch.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/text.h"
#include "dsengine/comm.h"
#include "dsengine/engine.h"
#include "tests/support/borrowed.h"

namespace ds::engine {

// Values come from formulas: torch's global generator is shared by ranks that are threads.
inline void fill(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  int64_t index = 0;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor steps = torch::arange(parameter.numel(), torch::kDouble) * 0.7 + static_cast<double>(index++);
    parameter.copy_((torch::sin(steps) * 0.4).view(parameter.sizes()).to(parameter.scalar_type()));
  }
}

struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 11));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({11})));
    last = register_module("last", torch::nn::Linear(11, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(norm(first(x)))); }
  // Mean squared error against a target that depends on the input.
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(first->weight.scalar_type());
    return (forward(typed) - typed.narrow(1, 0, 3).sin() * 3.0).pow(2).mean();
  }

  torch::nn::Linear first{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(SmallNet);

// The input of one micro-batch of one rank: [4, 6] float32.
inline at::Tensor sample(int64_t micro_batch, int rank) {
  const at::Tensor steps = torch::arange(24, torch::kDouble) * 1.3 + static_cast<double>(17 * micro_batch + 5 * rank);
  return torch::cos(steps).view({4, 6}).to(torch::kFloat);
}

using State = std::map<std::string, at::Tensor>;

inline State copy_of(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  return {parameters.begin(), parameters.end()};
}

inline State parameters_of(const torch::nn::Module& module) {
  State state;
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value().detach().clone();
  return state;
}

inline State buffers_of(const torch::nn::Module& module) {
  State state;
  for (const auto& item : module.named_buffers()) state[item.key()] = item.value().clone();
  return state;
}

// The largest difference over all elements. Both must hold the same names.
inline double largest_difference(const State& a, const State& b) {
  double largest = a.size() == b.size() ? 0.0 : 1e9;
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    if (other == b.end()) return 1e9;
    largest =
        std::max(largest, (tensor.to(torch::kDouble) - other->second.to(torch::kDouble)).abs().max().item<double>());
  }
  return largest;
}

using test::borrowed;

// Stage 3: a bucket for every parameter, and none stays.
inline nlohmann::ordered_json small_config(int stage, int accumulation) {
  nlohmann::ordered_json zero = {{"stage", stage}};
  if (stage == 3) {
    zero["stage3_param_persistence_threshold"] = 0;
    zero["stage3_max_reuse_distance"] = 0;
    zero["reduce_bucket_size"] = 40;
  }
  return {{"train_micro_batch_size_per_gpu", 4},
          {"gradient_accumulation_steps", accumulation},
          {"gradient_clipping", 0.0},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}}}}},
          {"zero_optimization", zero}};
}

inline Initialized start(const std::shared_ptr<torch::nn::Module>& model, const nlohmann::ordered_json& config,
                         comm::Communicator& communicator) {
  return initialize({.model = model, .config = config, .communicator = borrowed(communicator)});
}

// Runs `steps` optimizer steps of the engine on `model` and returns its float32 weights.
inline State train(Engine& engine, SmallNet& model, int steps) {
  const int64_t accumulation = engine.gradient_accumulation_steps();
  for (int64_t micro = 0; micro < steps * accumulation; ++micro) {
    engine.backward(model->loss(sample(micro, engine.global_rank())));
    engine.step();
  }
  return copy_of(engine.fp32_state_dict());
}

// What plain torch makes of the same batches in one process.
struct TorchRun {
  int world = 1;
  int accumulation = 1;
  int steps = 5;
  double clip_norm = 0.0;
  // After the mean gradient of the global batch is known, before the optimizer.
  std::function<void(torch::nn::Module&)> change_gradients = {};

  State train(SmallNet& model, torch::optim::Optimizer& optimizer) const {
    for (int64_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
        for (int rank = 0; rank < world; ++rank) {
          (model->loss(sample(micro, rank)) / static_cast<double>(accumulation * world)).backward();
        }
      }
      if (change_gradients) change_gradients(*model);
      if (clip_norm > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), clip_norm);
      optimizer.step();
    }
    return parameters_of(*model);
  }
  State train_adamw(double lr = 0.02, double weight_decay = 0.1) const {
    SmallNet model;
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(lr).weight_decay(weight_decay));
    return train(model, optimizer);
  }
};

}  // namespace ds::engine
