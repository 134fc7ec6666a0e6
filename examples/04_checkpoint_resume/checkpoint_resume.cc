// A training that can be ended and started again.
//
//   cd examples/04_checkpoint_resume
//   ds-launch --num_procs 2 PATH/checkpoint_resume run 20    # trains 20 steps, saving into the folder "run"
//   ds-launch --num_procs 2 PATH/checkpoint_resume run 40    # goes on from step 20 to step 40
//
// The second line ends with the loss that 40 steps at once end with, to the last digit. A checkpoint holds weights,
// the optimizer's state, the schedule, random numbers and the place in the data; it may be loaded by another number of
// ranks, at another ZeRO stage and in another precision.
#include <ATen/CPUGeneratorImpl.h>
#include <dsengine/checkpoint.h>
#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iomanip>
#include <iostream>
#include <string>

namespace {

// Points in the plane and their distance from the origin. A dataset needs get() and size(), nothing else.
struct Distances {
  torch::data::Example<> get(size_t index) const {
    auto random = at::make_generator<at::CPUGeneratorImpl>(index);
    const auto point = torch::rand({2}, random) * 2 - 1;
    return {point, point.norm().unsqueeze(0)};
  }
  size_t size() const { return 512; }
};

void train(const std::string& folder, int64_t steps) {
  torch::manual_seed(1);  // two runs can be compared only where both start from the same weights
  torch::nn::Sequential model(torch::nn::Linear(2, 64), torch::nn::Tanh(), torch::nn::Dropout(0.1),
                              torch::nn::Linear(64, 1));
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(), .config = "ds_config.json", .training_data = Distances()});
  const bool tells = engine->global_rank() == 0;

  // On every rank. Nothing is loaded where the folder has no checkpoint yet; the result says which one it was.
  if (const auto loaded = engine->load_checkpoint(folder); loaded && tells) {
    std::cout << "goes on from " << loaded.tag << std::endl;
  }
  // Steps go on counting, and the loader goes on where it stood.
  while (engine->global_steps() < steps) {
    for (auto& batch : *loader) {
      const auto loss = torch::mse_loss(model->forward(batch.data), batch.target);
      engine->backward(loss);
      engine->step();
      const int64_t step = engine->global_steps();
      // A save is complete or absent, also when the machine loses power in the middle of it.
      if (step % 10 == 0) engine->save_checkpoint(folder);
      if (tells && step % 10 == 0) {
        std::cout << "step " << step << "  loss " << std::setprecision(9) << loss.item<float>() << std::endl;
      }
      if (step == steps) break;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: checkpoint_resume FOLDER STEPS\n";
    return EXIT_FAILURE;
  }
  try {
    train(argv[1], std::stoll(argv[2]));
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "checkpoint_resume: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
