// The loop of PyTorch's imagenet example as a plain one: DistributedDataParallel, torch::optim::SGD with a StepLR,
// torch::data's loader with a distributed sampler, SyncBatchNorm, train() and validate() by epochs.
//
//   ds-launch --nproc_per_node 2 imagenet_ddp [--seed N]
//
// Against the Python program: ds::convert_sync_batchnorm for torch.nn.SyncBatchNorm.convert_sync_batchnorm (also on the
// CPU), ddp_model->train() and its forward as there; imagenet.cc beside it is the same with the engine.
#include <dsengine/distributed_data_parallel.h>
#include <dsengine/init_distributed.h>
#include <dsengine/sync_batch_norm.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>

#include "loop.h"
#include "resnet.h"
#include "stripes.h"

namespace {

using imagenet::kEpochs;
using imagenet::Stripes;
using Job = ds::engine::Distributed;
using Replica = ds::DistributedDataParallel<imagenet::ResNet>;

constexpr int64_t kBatch = 16;  // of one rank

void train(const Job& job, Replica& model, torch::optim::SGD& optimizer, int epoch) {
  auto images = Stripes(/*size=*/512, /*seed=*/0).map(torch::data::transforms::Stack<>());
  torch::data::samplers::DistributedRandomSampler sampler(*images.size(), static_cast<size_t>(job.ranks->size()),
                                                          static_cast<size_t>(job.ranks->rank()),
                                                          /*allow_duplicates=*/false);
  sampler.set_epoch(static_cast<size_t>(epoch));
  auto loader = torch::data::make_data_loader(images, sampler, torch::data::DataLoaderOptions(kBatch));
  model.module->train();
  for (auto& batch : *loader) {
    const auto scores = model(batch.data.to(job.device));
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(scores, batch.target.to(job.device)).backward();
    optimizer.step();
  }
}

// Each rank looks at its share; sums travel, and no mean of parts that differ in size.
double validate(const Job& job, imagenet::ResNet& model, Stripes images) {
  const torch::NoGradGuard no_gradient;
  model->eval();
  auto right = imagenet::count_top1(model, images, job.ranks->rank(), job.ranks->size(), job.device);
  job.ranks->all_reduce(right).wait();
  return right.item<double>() / static_cast<double>(*images.size());
}

void run(uint64_t seed) {
  const Job job = ds::engine::init_distributed();
  const bool first = job.ranks->rank() == 0;
  torch::manual_seed(seed);  // of the weights that the model starts with
  imagenet::ResNet model(/*width=*/8, imagenet::kKinds);
  model->to(job.device);
  const auto converted = ds::convert_sync_batchnorm(*model);  // over the ranks of the wrapper that takes the model
  Replica ddp_model(model, {.process_group = job.ranks});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));
  torch::optim::StepLR scheduler(optimizer, imagenet::kEpochsUntilDecay, /*gamma=*/0.1);
  if (first) std::cout << converted.size() << " layers of BatchNorm over all ranks" << std::endl;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    train(job, ddp_model, optimizer, epoch);
    const double top1 = validate(job, model, Stripes(/*size=*/200, /*seed=*/100000));
    scheduler.step();
    if (first) std::cout << "epoch " << epoch << "  Acc@1 " << 100 * top1 << std::endl;
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(imagenet::seed_of(count, arguments));
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "imagenet_ddp: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
