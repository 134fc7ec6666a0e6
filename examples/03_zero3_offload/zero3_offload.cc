// ZeRO-3 with parameters and optimizer in host memory: for a model whose states do not fit on the device.
//
//   cd examples/03_zero3_offload && ds-launch --num_procs 2 PATH/zero3_offload
//
// The loop is that of 01_first_step; what is new stands in ds_config.json. With "bf16" the model's parameters are bf16
// from initialize() on, so its inputs are too. A program has to know two things of stage 3:
//   * a parameter has memory only while operators read it, so all ranks run forward together;
//   * who reads or changes parameters apart from forward opens a scope of gathered_parameters(), on every rank.
#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <dsengine/zero.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iostream>

namespace {

constexpr int64_t kWidth = 256;

// Any module will do: no wrapper, no hooks. The engine sees which operator is about to read which parameter.
torch::nn::Sequential make_model() {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 8; ++layer) {
    model->push_back(torch::nn::Linear(kWidth, kWidth));
    model->push_back(torch::nn::GELU());
  }
  model->push_back(torch::nn::Linear(kWidth, 1));
  return model;
}

double mebibytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void train() {
  auto model = make_model();
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(), .config = "ds_config.json"});
  const bool tells = engine->global_rank() == 0;
  for (int step = 1; step <= 40; ++step) {
    const auto x = torch::randn({16, kWidth}, torch::dtype(torch::kBFloat16).device(engine->device()));
    const auto loss = torch::mse_loss(model->forward(x), x.slice(/*dim=*/1, 0, 4).sum(1, /*keepdim=*/true));
    engine->backward(loss);
    engine->step();
    if (tells && step % 10 == 0) std::cout << "step " << step << "  loss " << loss.item<float>() << std::endl;
  }

  // Outside of the scope this tensor has no elements. Inside, every rank has all of it.
  const auto weight = model->parameters().front();
  double norm = 0;
  {
    const auto whole = engine->gathered_parameters({weight});
    norm = weight.norm().item<double>();
  }
  const auto device = engine->model_state_bytes();
  const auto host = engine->offloaded_state_bytes();
  if (!tells) return;
  std::cout << "the first weight has a norm of " << norm << '\n'
            << "model state between steps on this rank: "
            << mebibytes(device.parameters + device.master + device.optimizer) << " MiB on the device, "
            << mebibytes(host.host_total()) << " MiB in host memory" << std::endl;
}

}  // namespace

int main() {
  try {
    train();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "zero3_offload: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
