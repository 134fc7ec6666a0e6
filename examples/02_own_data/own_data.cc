// A dataset of one's own, epochs, and a figure over all ranks.
//
//   cd examples/02_own_data && ds-launch --num_procs 2 PATH/own_data
//
// What is new beside 01_first_step:
//   * a torch::data dataset, which the engine deals out to the ranks: each sample goes to one rank, and each epoch has
//     an order of its own;
//   * evaluation: eval(), no gradient, and an all_reduce that joins what the ranks counted.
#include <ATen/CPUGeneratorImpl.h>
#include <dsengine/comm.h>
#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>

namespace {

constexpr int64_t kLength = 32;  // numbers in a wave
constexpr int64_t kKinds = 4;

// Noisy waves of 1 to 4 periods; which of the four a wave is, is what the model learns. get() is asked for one sample
// at a time, by its number: a dataset that reads files would open the file of that sample here.
class Waves : public torch::data::datasets::Dataset<Waves> {
 public:
  Waves(size_t size, uint64_t seed) : size_(size), seed_(seed) {}

  torch::data::Example<> get(size_t index) override {
    // Drawn from the number of the sample, so that every rank, and every run, sees the same sample under this number.
    auto random = at::make_generator<at::CPUGeneratorImpl>(seed_ + index);
    const auto kind = static_cast<int64_t>(index) % kKinds;
    const double phase = torch::rand({}, random).item<double>() * 2 * M_PI;
    const auto time = torch::arange(kLength) * (2 * M_PI * static_cast<double>(kind + 1) / kLength);
    return {torch::sin(time + phase) + torch::randn({kLength}, random), torch::tensor(kind)};
  }
  torch::optional<size_t> size() const override { return size_; }

 private:
  size_t size_;
  uint64_t seed_;
};

torch::nn::Sequential make_model() {
  return torch::nn::Sequential(torch::nn::Linear(kLength, 64), torch::nn::ReLU(), torch::nn::Linear(64, kKinds));
}

// The part of the samples that the model names rightly. Each rank looks at its share of them.
double accuracy(ds::engine::Engine& engine, torch::nn::Sequential& model, Waves data) {
  const torch::NoGradGuard no_gradient;
  engine.eval();
  auto right = torch::zeros({}, engine.device());
  const auto samples = static_cast<int64_t>(*data.size());
  for (int64_t index = engine.global_rank(); index < samples; index += engine.world_size()) {
    const auto sample = data.get(static_cast<size_t>(index));
    const auto scores = model->forward(sample.data.unsqueeze(0).to(engine.device()));
    right += scores.argmax().item<int64_t>() == sample.target.item<int64_t>() ? 1 : 0;
  }
  engine.communicator().all_reduce(right).wait();  // the sum over the ranks, in place
  engine.train();
  return right.item<double>() / static_cast<double>(samples);
}

void train() {
  auto model = make_model();
  auto [engine, optimizer, loader, schedule] = ds::engine::initialize(
      {.model = model.ptr(), .config = "ds_config.json", .training_data = Waves(/*size=*/2000, /*seed=*/0)});
  for (int epoch = 1; epoch <= 5; ++epoch) {
    for (auto& batch : *loader) {  // train_micro_batch_size_per_gpu samples, on the engine's device
      engine->backward(torch::nn::functional::cross_entropy(model->forward(batch.data), batch.target));
      engine->step();
    }
    const double rightly = accuracy(*engine, model, Waves(/*size=*/400, /*seed=*/100000));
    if (engine->global_rank() == 0) std::cout << "epoch " << epoch << "  accuracy " << rightly << std::endl;
  }
}

}  // namespace

int main() {
  try {
    train();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "own_data: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
