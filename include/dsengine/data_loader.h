// Loads batches of any torch::data dataset; each rank gets its share of the samples.
//
//   for (auto& batch : *loader) { model->forward(batch.data, batch.target); ... }   // one epoch
//
// engine::initialize makes the loader from InitializeOptions::training_data, as DeepSpeed's deepspeed_io. The loader
// shares the dataset with the program. Not thread safe. Throws UsageError for datasets and samples that make no
// batches.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "dsengine/read_ahead.h"
#include "dsengine/training_data.h"

namespace ds::engine {

// How a loader reads; of InitializeOptions too.
struct LoadingOptions {
  // Workers that read ahead. in_order = false is refused: the engine's checkpoints keep a position in the order. With
  // data_efficiency.data_sampling its num_workers counts where this one is 0.
  data::ReadOptions reading = {};
  // A sampler of one's own: the numbers of the samples of an epoch, for all ranks, any number of times each. A function
  // of the epoch alone, alike on all ranks. Excludes data_efficiency.data_sampling.
  std::function<std::vector<int64_t>(int64_t epoch)> order = {};
  // Makes a batch of samples, on any worker; empty: tensors are stacked along dimension 0.
  std::function<Batch(std::vector<Batch> samples)> collate = {};
};

// Options of DataLoader.
struct DataLoaderOptions {
  int64_t micro_batch_size = 1;  // samples in a batch of one rank
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1234;  // equal on every rank
  bool shuffle = true;
  bool drop_last = false;        // the key dataloader_drop_last
  at::Device device = at::kCPU;  // where batches are delivered
  LoadingOptions loading = {};
};

// One rank's loader. Each loop goes from the current position to the end of the epoch; the next loop reshuffles. A loop
// that was left early is continued by the next one. On a device a batch may be used on the stream that is current when
// it is taken; work on another stream has to wait for that stream first. Not thread safe.
class DataLoader {
 public:
  // Throws UsageError for an empty dataset, one that does not know its size, and options out of range. Taking a batch
  // throws data::SampleError, which is one, where the dataset threw.
  DataLoader(const TrainingData& data, const DataLoaderOptions& options);
  // Loads the samples that `sampler` chooses, as the engine's curriculum does; of the options rank, world_size, device
  // and loading.
  DataLoader(TrainingData data, std::shared_ptr<BatchSampler> sampler, const DataLoaderOptions& options);
  ~DataLoader();

  using Iterator = data::BatchIterator<DataLoader, Batch>;

  Iterator begin() { return Iterator(this); }
  Iterator end() { return {}; }

  // The number of batches in an epoch, equal on every rank.
  int64_t size() const;
  // Whether all batches of an epoch have as many samples; else the last one has fewer.
  bool has_equal_batches() const;
  int64_t epoch() const;
  void set_epoch(int64_t epoch);
  void set_micro_batch_size(int64_t size);

  // The numbers, in the dataset, of the samples in the last batch. Empty before the first batch.
  const std::vector<int64_t>& indices() const { return feed_->indices(); }
  // The time that loops have waited for batches so far.
  std::chrono::nanoseconds waited() const { return feed_->waited(); }
  // The number of batches delivered so far.
  int64_t delivered() const { return delivered_; }

  // The position after the last batch, to save and to go on from, also with another number of ranks.
  SamplerState state() const;
  void load_state(const SamplerState& state);
  const std::shared_ptr<BatchSampler>& sampler() const { return sampler_; }

 private:
  friend Iterator;
  Batch& current() { return batch_; }
  // Loads the next batch; false at the end of the epoch.
  bool advance();

  std::shared_ptr<data::Delivery> delivery_;  // brings batches to their device
  std::shared_ptr<BatchSampler> sampler_;
  std::unique_ptr<data::BatchFeed> feed_;
  Batch batch_;
  int64_t delivered_ = 0;
};

}  // namespace ds::engine
