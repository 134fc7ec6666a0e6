#include "dsengine/data_loader.h"

#include <ATen/ops/stack.h>

#include <utility>
#include <vector>

#include "core/check.h"
#include "core/device/transfer_stream.h"
#include "core/tensor_check.h"
#include "data/distributed_sampler.h"

namespace ds::engine {
namespace {

SamplerOptions sampler_options(const TrainingData& data, const DataLoaderOptions& options) {
  require(static_cast<bool>(data),
          "data loader: expected a dataset, found none; pass InitializeOptions::training_data");
  return {.dataset_size = data.size(),
          .batch_size = options.micro_batch_size,
          .rank = options.rank,
          .world_size = options.world_size,
          .seed = options.seed,
          .shuffle = options.shuffle,
          .drop_last = options.drop_last};
}

at::Tensor stack(const std::vector<at::Tensor>& samples, const std::vector<int64_t>& indices, const char* what) {
  for (size_t i = 1; i < samples.size(); ++i) {
    require(samples[i].sizes() == samples[0].sizes() && samples[i].scalar_type() == samples[0].scalar_type(),
            "data loader: samples of one batch must have one shape and dtype; ", what, " of sample ", indices[0],
            " is ", describe(samples[0]), ", of sample ", indices[i], " ", describe(samples[i]),
            "; pad them in the dataset's get()");
  }
  return at::stack(samples, 0);
}

}  // namespace

at::Tensor only_sample(const at::Tensor& batch) {
  if (!batch.defined()) return batch;
  require(batch.dim() > 0 && batch.size(0) == 1, "training data: expected a batch of one sample from the dataset's ",
          "get_batch({index}), along dimension 0, found ", describe(batch),
          "; the engine's loader makes batches itself");
  return batch.select(0, 0);
}

int64_t TrainingData::size() const {
  require(size_ >= 0,
          "training data: the dataset does not know its size (its size() is nullopt); a distributed sampler needs it");
  return size_;
}

DataLoader::DataLoader(TrainingData data, const DataLoaderOptions& options)
    : data_(std::move(data)),
      copies_(std::make_unique<TransferStream>(options.device)),
      sampler_(std::make_shared<DistributedSampler>(sampler_options(data_, options))) {}

DataLoader::DataLoader(TrainingData data, std::shared_ptr<BatchSampler> sampler, at::Device device)
    : data_(std::move(data)), copies_(std::make_unique<TransferStream>(device)), sampler_(std::move(sampler)) {}

DataLoader::~DataLoader() = default;

int64_t DataLoader::size() const { return sampler_->batches_per_epoch(); }
bool DataLoader::has_equal_batches() const { return sampler_->has_equal_batches(); }
int64_t DataLoader::epoch() const { return sampler_->state().epoch; }
void DataLoader::set_epoch(int64_t epoch) { sampler_->set_epoch(epoch); }
void DataLoader::set_micro_batch_size(int64_t size) { sampler_->set_batch_size(size); }
SamplerState DataLoader::state() const { return sampler_->state(); }
void DataLoader::load_state(const SamplerState& state) { sampler_->load_state(state); }

bool DataLoader::advance() {
  std::vector<int64_t> indices = sampler_->next_batch();
  if (indices.empty()) {
    batch_ = {};
    return false;
  }
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> targets;
  for (const int64_t index : indices) {
    Batch sample = data_.get(index);
    data.push_back(std::move(sample.data));
    if (sample.target.defined()) targets.push_back(std::move(sample.target));
  }
  require(targets.empty() || targets.size() == data.size(), "data loader: ", targets.size(), " of ", data.size(),
          " samples of a batch have a target; expected all or none");
  batch_.data = copies_->upload(stack(data, indices, "data"));
  batch_.target = targets.empty() ? at::Tensor() : copies_->upload(stack(targets, indices, "target"));
  indices_ = std::move(indices);
  ++delivered_;
  return true;
}

}  // namespace ds::engine
