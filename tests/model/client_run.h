// Optimizers of a program, by name, over a small network, and its training by the engine and by plain torch.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/model/small_run.h"

namespace ds::engine {

// Biases are a second group, with another learning rate.
inline std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> weights_and_biases(const SmallNet& model) {
  std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> result;
  for (const auto& item : model->named_parameters()) {
    (item.key().ends_with("bias") ? result.second : result.first).push_back(item.value());
  }
  return result;
}

template <class Optimizer, class Options>
std::shared_ptr<torch::optim::Optimizer> two_groups(const SmallNet& model, const Options& options, double bias_lr) {
  auto [weights, biases] = weights_and_biases(model);
  Options other = options;
  other.set_lr(bias_lr);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights);
  groups.emplace_back(biases, std::make_unique<Options>(other));
  return std::make_shared<Optimizer>(groups, options);
}

// All of torch's that update element by element, with what else they can do.
inline std::shared_ptr<torch::optim::Optimizer> torch_optimizer(const std::string& name, const SmallNet& model) {
  using namespace torch::optim;
  if (name == "SGD") {
    return two_groups<SGD>(model, SGDOptions(0.02).momentum(0.9).dampening(0.3).weight_decay(0.01), 0.05);
  }
  if (name == "Nesterov") return two_groups<SGD>(model, SGDOptions(0.02).momentum(0.9).nesterov(true), 0.01);
  if (name == "Adam") return two_groups<Adam>(model, AdamOptions(0.01).weight_decay(0.01).betas({0.8, 0.95}), 0.02);
  if (name == "AMSGrad") return two_groups<Adam>(model, AdamOptions(0.01).amsgrad(true), 0.02);
  if (name == "AdamW") return two_groups<AdamW>(model, AdamWOptions(0.02).weight_decay(0.1), 0.005);
  if (name == "RMSprop") {
    return two_groups<RMSprop>(model, RMSpropOptions(0.003).momentum(0.5).centered(true).weight_decay(0.01), 0.006);
  }
  if (name == "Adagrad") {
    return two_groups<Adagrad>(model, AdagradOptions(0.03).lr_decay(0.01).initial_accumulator_value(0.1), 0.06);
  }
  throw std::runtime_error("no optimizer " + name);
}

using MakeOptimizer = std::function<std::shared_ptr<torch::optim::Optimizer>(const SmallNet&)>;

inline MakeOptimizer of_torch(const std::string& name) {
  return [name](const SmallNet& model) { return torch_optimizer(name, model); };
}

struct ClientRun {
  int world = 2;
  int steps = 50;
  int accumulation = 1;
  double clip_norm = 0.0;
  // After each step, with the optimizer: a scheduler of torch's, say.
  std::function<std::function<void()>(torch::optim::Optimizer&)> after_steps = {};
};

// The loss of each micro-batch of each rank: [micro * world + rank].
inline std::vector<double> plain_losses(const ClientRun& run, const MakeOptimizer& make) {
  SmallNet model;
  const auto optimizer = make(model);
  const std::function<void()> after = run.after_steps ? run.after_steps(*optimizer) : [] {};
  std::vector<double> losses;
  for (int64_t step = 0; step < run.steps; ++step) {
    optimizer->zero_grad();
    for (int64_t micro = step * run.accumulation; micro < (step + 1) * run.accumulation; ++micro) {
      for (int rank = 0; rank < run.world; ++rank) {
        const at::Tensor loss = model->loss(sample(micro, rank));
        losses.push_back(loss.item<double>());
        (loss / static_cast<double>(run.accumulation * run.world)).backward();
      }
    }
    if (run.clip_norm > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), run.clip_norm);
    optimizer->step();
    after();
  }
  return losses;
}

// The largest difference of a loss of this rank.
inline double trained_difference(const ClientRun& run, Engine& engine, SmallNet& model,
                                 torch::optim::Optimizer& optimizer, const std::vector<double>& expected,
                                 int64_t first_step = 0) {
  const std::function<void()> after = run.after_steps ? run.after_steps(optimizer) : [] {};
  double largest = 0;
  for (int64_t micro = first_step * run.accumulation; micro < int64_t{run.steps} * run.accumulation; ++micro) {
    const at::Tensor loss = model->loss(sample(micro, engine.global_rank()));
    const double truth = expected[static_cast<size_t>(micro * run.world + engine.global_rank())];
    largest = std::max(largest, std::abs(loss.item<double>() - truth));
    engine.backward(loss);
    engine.step();
    if (engine.was_step_applied()) after();
  }
  return largest;
}

inline nlohmann::ordered_json client_config(int stage, int accumulation = 1) {
  nlohmann::ordered_json config = small_config(stage, accumulation);
  config.erase("optimizer");
  return config;
}

inline Initialized start_client(const SmallNet& model, const nlohmann::ordered_json& config,
                                const std::shared_ptr<torch::optim::Optimizer>& optimizer,
                                comm::Communicator& communicator) {
  return initialize(
      {.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(communicator)});
}

}  // namespace ds::engine
