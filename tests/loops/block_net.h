// A model of blocks, its data, and plain torch over the joined batches of all ranks.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "dsengine/comm.h"
#include "tests/support/borrowed.h"

namespace ds::test {

// Values come from formulas: torch's global generator is shared by ranks that are threads.
inline void fill(torch::nn::Module& module, double scale = 0.4) {
  const torch::NoGradGuard no_grad;
  int64_t index = 0;
  for (at::Tensor& parameter : module.parameters()) {
    const at::Tensor steps = torch::arange(parameter.numel(), torch::kDouble) * 0.7 + static_cast<double>(index++);
    parameter.copy_((torch::sin(steps) * scale).view(parameter.sizes()));
  }
}

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(6, 13));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({13})));
    down = register_module("down", torch::nn::Linear(13, 6));
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(norm(up(x)))); }

  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Block);

struct BlockNetImpl : torch::nn::Module {
  BlockNetImpl() {
    in = register_module("enter", torch::nn::Linear(5, 6));
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module(cat("block", i), Block()));
    out = register_module("out", torch::nn::Linear(6, 2));
    scale = register_buffer("scale", torch::full({1}, 0.5));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = in(x);
    for (Block& block : blocks) h = block(h);
    return out(h) * scale.to(h.scalar_type());
  }
  // Mean squared error against a target that depends on the input.
  at::Tensor loss(const at::Tensor& x) {
    return (forward(x.to(in->weight.scalar_type())).to(torch::kFloat) - x.narrow(1, 0, 2).sin()).pow(2).mean();
  }

  torch::nn::Linear in{nullptr}, out{nullptr};
  std::vector<Block> blocks;
  at::Tensor scale;
};
TORCH_MODULE(BlockNet);

// The input of one batch of one rank: [4, 5] float32.
inline at::Tensor batch_of(int64_t step, int rank) {
  const at::Tensor steps = torch::arange(20, torch::kDouble) * 1.3 + static_cast<double>(17 * step + 5 * rank);
  return torch::cos(steps).view({4, 5}).to(torch::kFloat);
}

inline at::Tensor joined_batch(int64_t step, int ranks) {
  std::vector<at::Tensor> batches;
  for (int rank = 0; rank < ranks; ++rank) batches.push_back(batch_of(step, rank));
  return torch::cat(batches);
}

using Tensors = std::vector<at::Tensor>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;

// The optimizers that a loop may bring.
inline std::vector<std::pair<std::string, MakeOptimizer>> optimizers() {
  namespace optim = torch::optim;
  return {
      {"SgdMomentum",
       [](const Tensors& p) {
         return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam", [](const Tensors& p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions(2e-3)); }},
      {"AdamW",
       [](const Tensors& p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(2e-3).weight_decay(0.1)); }},
      {"RMSprop", [](const Tensors& p) { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(1e-3)); }},
      {"Adagrad", [](const Tensors& p) { return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(1e-2)); }},
  };
}

using NamedValues = std::vector<std::pair<std::string, at::Tensor>>;

// Copies of a module's parameters.
inline NamedValues named_values(const torch::nn::Module& module) {
  NamedValues values;
  for (const auto& item : module.named_parameters()) values.emplace_back(item.key(), item.value().detach().clone());
  return values;
}

// And of its buffers.
inline NamedValues state_values(const torch::nn::Module& module) {
  NamedValues values = named_values(module);
  for (const auto& item : module.named_buffers()) values.emplace_back(item.key(), item.value().clone());
  return values;
}

// A loop of plain torch; `micro_batches` add up before a step.
inline NamedValues train_plain(int ranks, int steps, const MakeOptimizer& make, int micro_batches = 1) {
  BlockNet model;
  const auto optimizer = make(model->parameters());
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    for (int micro = 0; micro < micro_batches; ++micro) {
      model->loss(joined_batch(step * micro_batches + micro, ranks)).backward();
    }
    optimizer->step();
  }
  return named_values(*model);
}

// Steps in which a rank sees the batches of two.
inline void train_joined(BlockNet& model, torch::optim::Optimizer& optimizer, int from, int steps) {
  for (int step = from; step < from + steps; ++step) {
    model->loss(joined_batch(step, 2)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

// One rank's steps of a plain loop.
inline void train(BlockNet& model, torch::optim::Optimizer& optimizer, int rank, int steps) {
  for (int step = 0; step < steps; ++step) {
    model->loss(batch_of(step, rank)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

// Over all elements of the parameters that `expected` names.
inline double largest_difference(const NamedValues& found, const NamedValues& expected) {
  double largest = 0;
  for (const auto& [name, value] : expected) {
    const auto same = std::find_if(found.begin(), found.end(), [&n = name](const auto& one) { return one.first == n; });
    if (same == found.end()) return 1e9;
    largest =
        std::max(largest, (same->second.to(torch::kDouble) - value.to(torch::kDouble)).abs().max().item<double>());
  }
  return largest;
}

}  // namespace ds::test
