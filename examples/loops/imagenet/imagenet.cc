// The loop of PyTorch's imagenet example: a ResNet with SyncBatchNorm, train() and validate() by epochs, top-1 accuracy
// over all ranks, the learning rate divided by ten on the way. The images are drawn, so that it runs anywhere.
//
//   cd examples/loops/imagenet && ds-launch --nproc_per_node 2 PATH/imagenet [--seed N]
//
// Against the Python program: ds::convert_sync_batchnorm for torch.nn.SyncBatchNorm.convert_sync_batchnorm (also on the
// CPU), engine->backward() and engine->step() for loss.backward() and optimizer.step(), the engine's loader for
// DataLoader with DistributedSampler. How the state is sharded stands in ds_config.json.
#include <dsengine/comm.h>
#include <dsengine/engine.h>
#include <dsengine/initialize.h>
#include <dsengine/sync_batch_norm.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>

#include "loop.h"
#include "resnet.h"
#include "stripes.h"

namespace {

using imagenet::kEpochs;
using imagenet::kKinds;
using imagenet::Stripes;

constexpr int kDecayStep = 16 * imagenet::kEpochsUntilDecay;  // 16 steps: 512 images, 2 ranks with batches of 16

// Each rank looks at its share; sums travel, and no mean of parts that differ in size.
double validate(ds::engine::Engine& engine, imagenet::ResNet& model, Stripes images) {
  const torch::NoGradGuard no_gradient;
  engine.eval();
  auto right = imagenet::count_top1(model, images, engine.global_rank(), engine.world_size(), engine.device());
  engine.communicator().all_reduce(right).wait();
  engine.train();
  return right.item<double>() / static_cast<double>(*images.size());
}

void run(uint64_t seed) {
  torch::manual_seed(seed);  // of the weights that the model starts with
  imagenet::ResNet model(/*width=*/8, kKinds);
  const auto converted = ds::convert_sync_batchnorm(*model);  // over the ranks of the engine that takes the model
  auto [engine, optimizer, loader, schedule] =
      ds::engine::initialize({.model = model.ptr(),
                              .config = "ds_config.json",
                              .training_data = Stripes(/*size=*/512, /*seed=*/0),
                              .lr_scheduler = [](int64_t step) { return step < kDecayStep ? 1.0 : 0.1; }});
  if (engine->global_rank() == 0) std::cout << converted.size() << " layers of BatchNorm over all ranks" << std::endl;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    for (auto& batch : *loader) {
      const auto scores = model->forward(batch.data);
      engine->backward(torch::nn::functional::cross_entropy(scores, batch.target));
      engine->step();
    }
    const double top1 = validate(*engine, model, Stripes(/*size=*/200, /*seed=*/100000));
    if (engine->global_rank() == 0) std::cout << "epoch " << epoch << "  Acc@1 " << 100 * top1 << std::endl;
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(imagenet::seed_of(count, arguments));
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "imagenet: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
