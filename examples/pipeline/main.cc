// A classifier of points on three spiral arms as a pipeline: the model is a list of layers, the rest is in the
// ds_config.
//
//   ds-launch --num_procs 4 spirals --deepspeed_config configs/pipeline.json
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include <dsengine/engine.h>
#include <dsengine/pipeline.h>

namespace {

using ds::pipeline::LayerSpec;

constexpr int64_t kArms = 3;
constexpr int64_t kWidth = 64;

// Point i of arm i mod 3.
struct Spirals {
  struct Example {
    at::Tensor data;    // [2]
    at::Tensor target;  // class
  };
  Example get(size_t index) const {
    const auto arm = static_cast<int64_t>(index) % kArms;
    const double along = std::fmod(static_cast<double>(index) * 0.618034, 1.0);
    const double angle = 4.0 * along + 2.0 * M_PI / kArms * static_cast<double>(arm);
    return {torch::tensor({along * std::cos(angle), along * std::sin(angle)}).to(torch::kFloat), torch::tensor(arm)};
  }
  size_t size() const { return 3000; }
};

std::vector<LayerSpec> layers() {
  std::vector<LayerSpec> list;
  list.push_back(LayerSpec::of<torch::nn::Linear>(2, kWidth));
  for (int i = 0; i < 6; ++i) {
    list.push_back(LayerSpec::function([](const at::Tensor& x) { return torch::gelu(x); }));
    list.push_back(LayerSpec::of<torch::nn::Linear>(kWidth, kWidth));
  }
  list.push_back(LayerSpec::function([](const at::Tensor& x) { return torch::gelu(x); }));
  list.push_back(LayerSpec::of<torch::nn::Linear>(kWidth, kArms));
  return list;
}

at::Tensor loss(const at::Tensor& scores, const at::Tensor& arm) {
  return torch::nn::functional::cross_entropy(scores, arm);
}

void train(const std::string& config, int steps) {
  const auto model = std::make_shared<ds::pipeline::PipelineModule>(
      layers(), ds::pipeline::PipelineOptions{.loss = loss, .seed_layers = true});
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model, .config = config, .training_data = Spirals()});
  for (int step = 1; step <= steps; ++step) {
    const at::Tensor mean = engine->train_batch();
    if (engine->global_rank() == 0 && (step % 50 == 0 || step == steps)) {
      std::cout << "step " << step << "  loss " << mean.item<float>() << std::endl;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a classifier as a pipeline", "spirals");
  std::string config;
  int steps = 300;
  app.add_option("--deepspeed_config", config, "The ds_config JSON file")->required();
  app.add_option("--steps", steps, "Batches to train on")->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    train(config, steps);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "spirals: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
