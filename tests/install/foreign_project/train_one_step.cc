// Trains one step with an installed dsengine; exit code 0 when the loss fell.
#include <dsengine/engine.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

int main() {
  using namespace ds;
  torch::nn::Linear model(4, 1);
  const nlohmann::json config = {{"train_micro_batch_size_per_gpu", 8},
                                 {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.05}}}}},
                                 {"zero_optimization", {{"stage", 2}}}};
  auto [engine, optimizer, loader, schedule] = engine::initialize({.model = model.ptr(), .config = config});
  const at::Tensor data = torch::ones({8, 4});
  const at::Tensor target = torch::full({8, 1}, 3.0);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 2; ++step) {
    const at::Tensor loss = torch::mse_loss(model->forward(data), target);
    engine->backward(loss);
    engine->step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  std::cout << "loss " << first << " -> " << last << "\n";
  return last < first ? 0 : 1;
}
