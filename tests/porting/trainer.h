// A training loop that a test writes once and runs in two ways: in one process over the global batch with LibTorch
// alone ("the plain loop"), and on several ranks with the engine. Tests compare the losses of the two.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dsengine/engine.h"
#include "tests/porting/programs.h"

namespace ds::engine {

// How a model is trained. Without an optimizer of the program it is AdamW with a weight decay of 0.01.
struct Recipe {
  double lr = 1e-3;
  double clip_norm = 0.0;                                   // 0: gradients are not clipped
  int accumulation = 1;                                     // micro-batches of a step
  std::function<double(int64_t)> lr_factor = {};            // takes the number of updates so far
  std::shared_ptr<torch::optim::Optimizer> optimizer = {};  // a client optimizer; null: AdamW
  Config keys = Config::object();                           // further keys of the engine's config
};

// A model with its optimizer, or without one where it is only evaluated.
class TrainedModel {
 public:
  virtual ~TrainedModel() = default;
  // Adds the gradients of a micro-batch. `loss` is the mean of the micro-batch or, with `scale_wrt_gas` false, its
  // share of the loss of the step.
  virtual void backward(const at::Tensor& loss, bool retain_graph = false, bool scale_wrt_gas = true) = 0;
  // Counts a micro-batch; after the last one of a step updates the weights.
  virtual void step() = 0;
  // Runs `body` with all parameters gathered, so that ranks may use different ones. Collective.
  virtual void with_whole_weights(const std::function<void()>& body) = 0;
  // Writes the weights, or the trained ones alone, to a file that every rank can read. Returns its path.
  virtual std::string save(const std::string& file, bool exclude_frozen = false) = 0;
  // The engine; null in the plain loop.
  virtual std::shared_ptr<Engine> engine() const { return nullptr; }
};

// Thrown by a Trainer that only finds out a program's config.
struct FoundConfig : std::exception {
  explicit FoundConfig(Config found) : config(std::move(found)) {}
  const char* what() const noexcept override { return "the config of a program"; }

  Config config;
};

// Trains models in one of the two ways.
class Trainer {
 public:
  // Trains in the plain loop.
  Trainer() = default;
  // Trains as one rank of the engine. `ranks` outlives it; `zero` is the section zero_optimization of every config.
  Trainer(comm::Communicator& ranks, Config zero) : ranks_(&ranks), zero_(std::move(zero)) {}
  // Makes one whose train() throws the FoundConfig of the engine that it would have made.
  static Trainer that_finds_config(Config zero) {
    Trainer trainer;
    trainer.zero_ = std::move(zero);
    trainer.finds_config_ = true;
    return trainer;
  }

  // The ranks of the job; null in the plain loop.
  comm::Communicator* ranks() const { return ranks_; }
  int rank() const { return ranks_ == nullptr ? 0 : ranks_->rank(); }
  int world() const { return ranks_ == nullptr ? 1 : ranks_->size(); }
  // The config of a recipe's engine.
  Config config(const Recipe& recipe) const;

  // Returns the model with its optimizer, on the engine or not. On the engine it is collective.
  std::shared_ptr<TrainedModel> train(const std::shared_ptr<torch::nn::Module>& model, const Recipe& recipe = {}) const;
  // Returns a model that is evaluated only, in evaluation mode.
  std::shared_ptr<TrainedModel> evaluate(const std::shared_ptr<torch::nn::Module>& model) const;
  // Runs backward of one loss over several models.
  void backward(const at::Tensor& loss, const std::vector<std::shared_ptr<TrainedModel>>& models) const;

  // Returns this rank's part of a global batch.
  at::Tensor part(const at::Tensor& batch) const { return ranks_ == nullptr ? batch : part_of(batch, *ranks_); }
  // Return the sum and the mean over ranks, without a gradient. Collective.
  at::Tensor sum(const at::Tensor& value) const;
  at::Tensor mean(const at::Tensor& value) const { return sum(value) / world(); }
  // Returns this rank's loss for a global batch of which ranks have different numbers of items: the mean over ranks is
  // the sum of all losses divided by the number of all items. Collective.
  at::Tensor per_item(const at::Tensor& sum_of_losses, const at::Tensor& items) const {
    return sum_of_losses * (world() / sum(items.to(torch::kDouble)).item<double>());
  }

 private:
  comm::Communicator* ranks_ = nullptr;
  Config zero_;
  bool finds_config_ = false;
};

// Returns the config of the engine that a program trains on.
template <class Train>
Config config_of(const Train& train, const Config& zero) {
  try {
    train(Trainer::that_finds_config(zero));
  } catch (const FoundConfig& found) {
    return found.config;
  }
  return {};
}

// Makes a test program of one function, which trains by the Trainer that it gets and returns the losses of this rank.
inline Program written_once(std::string name, Losses (*train)(const Trainer&), double tolerance = 1e-6) {
  return {.name = std::move(name),
          .tolerance = tolerance,
          .train_plainly = [train](int /*world*/) { return train(Trainer()); },
          .train_on_engine = [train](comm::Communicator& communicator,
                                     const Config& zero) { return train(Trainer(communicator, zero)); },
          .config = [train](int /*ranks*/, const Config& zero) { return config_of(train, zero); }};
}

// Returns the sum of the absolute values of all weights, which programs add to their losses to compare weights, too.
double sum_of_weights(const torch::nn::Module& model);

inline at::Tensor normal(at::IntArrayRef sizes, uint64_t seed) {
  at::Generator generator = generator_of(seed);
  return torch::randn(sizes, generator);
}
inline at::Tensor uniform(at::IntArrayRef sizes, uint64_t seed) {
  at::Generator generator = generator_of(seed);
  return torch::rand(sizes, generator);
}
inline at::Tensor integers(int64_t below, at::IntArrayRef sizes, uint64_t seed) {
  return (uniform(sizes, seed) * static_cast<double>(below)).to(torch::kLong).clamp_max(below - 1);
}

}  // namespace ds::engine
