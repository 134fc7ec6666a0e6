// The loop of PyTorch's imagenet example as a plain one: DistributedDataParallel, torch::optim::SGD with a StepLR,
// torch::data's loader with a distributed sampler, SyncBatchNorm, train() and validate() by epochs.
//
//   ds-launch --nproc_per_node 2 imagenet_ddp
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

#include "resnet.h"
#include "stripes.h"

namespace {

using imagenet::Stripes;
using Job = ds::engine::Distributed;
using Replica = ds::DistributedDataParallel<imagenet::ResNet>;

constexpr int kEpochs = 3;
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
  auto right = torch::zeros({}, job.device);
  const auto count = static_cast<int64_t>(*images.size());
  for (int64_t index = job.ranks->rank(); index < count; index += job.ranks->size()) {
    const auto image = images.get(static_cast<size_t>(index));
    const auto scores = model->forward(image.data.unsqueeze(0).to(job.device));
    right += scores.argmax().item<int64_t>() == image.target.item<int64_t>() ? 1 : 0;
  }
  job.ranks->all_reduce(right).wait();
  return right.item<double>() / static_cast<double>(count);
}

void run() {
  const Job job = ds::engine::init_distributed();
  const bool first = job.ranks->rank() == 0;
  imagenet::ResNet model(/*width=*/8, imagenet::kKinds);
  model->to(job.device);
  const auto converted = ds::convert_sync_batchnorm(*model);  // over the ranks of the wrapper that takes the model
  Replica ddp_model(model, {.process_group = job.ranks});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/2, /*gamma=*/0.1);
  if (first) std::cout << converted.size() << " layers of BatchNorm over all ranks" << std::endl;
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    train(job, ddp_model, optimizer, epoch);
    const double top1 = validate(job, model, Stripes(/*size=*/200, /*seed=*/100000));
    scheduler.step();
    if (first) std::cout << "epoch " << epoch << "  Acc@1 " << 100 * top1 << std::endl;
  }
}

}  // namespace

int main() {
  try {
    run();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "imagenet_ddp: error: " << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
