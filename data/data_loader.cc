#include "dsengine/data_loader.h"

#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/tensor_check.h"
#include "data/distributed_sampler.h"
#include "dsengine/collate.h"

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
          .drop_last = options.drop_last,
          .order = options.loading.order};
}

// Reads a batch, on any thread.
data::BatchFeed::Value read_batch(const TrainingData& data, const LoadingOptions& loading,
                                  const data::Delivery& delivery, const std::vector<int64_t>& indices) {
  std::vector<Batch> samples;
  samples.reserve(indices.size());
  for (const int64_t index : indices) {
    data::begin_sample(index);
    samples.push_back(data.get(index));
  }
  data::begin_sample(-1);
  Batch batch = loading.collate ? loading.collate(std::move(samples))
                                : data::Collated<Batch>::of(std::move(samples), "the value");
  batch.data = delivery.stage(batch.data);
  batch.target = delivery.stage(batch.target);
  return std::make_shared<Batch>(std::move(batch));
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

DataLoader::DataLoader(const TrainingData& data, const DataLoaderOptions& options)
    : DataLoader(data, std::make_shared<DistributedSampler>(sampler_options(data, options)), options) {}

DataLoader::DataLoader(TrainingData data, std::shared_ptr<BatchSampler> sampler, const DataLoaderOptions& options)
    : delivery_(std::make_shared<data::Delivery>(options.device, options.loading.reading.pin_memory)),
      sampler_(std::move(sampler)) {
  require(options.loading.reading.in_order, "data loader: the engine's checkpoints keep a position in the order of ",
          "batches, found in_order = false; leave it out, or use ds::data::Loader (dsengine/loader.h)");
  const auto read = [data = std::move(data), loading = options.loading, delivery = delivery_](
                        const std::vector<int64_t>& indices) { return read_batch(data, loading, *delivery, indices); };
  feed_ = std::make_unique<data::BatchFeed>(
      sampler_, read, data::FeedOptions{options.loading.reading, options.rank, options.world_size});
}

DataLoader::~DataLoader() = default;

int64_t DataLoader::size() const { return sampler_->batches_per_epoch(); }
bool DataLoader::has_equal_batches() const { return sampler_->has_equal_batches(); }
int64_t DataLoader::epoch() const { return sampler_->state().epoch; }
void DataLoader::set_epoch(int64_t epoch) { sampler_->set_epoch(epoch); }
void DataLoader::set_micro_batch_size(int64_t size) { sampler_->set_batch_size(size); }
SamplerState DataLoader::state() const { return sampler_->state(); }
void DataLoader::load_state(const SamplerState& state) { sampler_->load_state(state); }

bool DataLoader::advance() {
  const data::BatchFeed::Value value = feed_->next();
  if (!value) {
    batch_ = {};
    return false;
  }
  const auto& read = *static_cast<const Batch*>(value.get());
  batch_ = {delivery_->deliver(read.data), delivery_->deliver(read.target)};
  ++delivered_;
  return true;
}

}  // namespace ds::engine
