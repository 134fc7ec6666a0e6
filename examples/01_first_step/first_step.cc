#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <torch/torch.h>

#include <iostream>

// Learns to multiply two numbers. Every rank draws points of its own; the engine makes one model of all they learn.
int main() {
  torch::nn::Sequential model(torch::nn::Linear(2, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(), .config = "ds_config.json"});
  for (int step = 1; step <= 300; ++step) {
    auto points = torch::rand({32, 2}, engine->device());
    auto loss = torch::mse_loss(model->forward(points), points.prod(/*dim=*/1, /*keepdim=*/true));
    engine->backward(loss);
    engine->step();
    if (step % 100 == 0 && engine->global_rank() == 0) {
      std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
    }
  }
}
