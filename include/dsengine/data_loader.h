// Batches of any torch::data dataset, dealt to ranks.
//
//   for (auto& batch : *loader) { model->forward(batch.data, batch.target); ... }   // one epoch
//
// Made by engine::initialize from InitializeOptions::training_data; DeepSpeed's deepspeed_io. The loader shares the
// dataset with the program. Not thread safe. Throws UsageError for datasets and samples that make no batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace ds::engine {

class DistributedSampler;  // which samples a rank sees, in which order
struct SamplerState;       // where it stands; the engine's checkpoints keep it

// One sample, or samples stacked along dimension 0. `target` is undefined for datasets without one.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

// A dataset that gives sample number i as torch::data::Example<> (anything with a tensor `data`, and maybe `target`)
// and knows its size (a number, or an optional one as torch::data::datasets::Dataset has it).
template <class Dataset>
concept IndexedDataset = requires(Dataset& dataset, size_t index) {
  { dataset.get(index).data } -> std::convertible_to<at::Tensor>;
  dataset.size();
};

// Holds any indexed dataset; empty by default. Copies share the dataset.
class TrainingData {
 public:
  TrainingData() = default;

  // Of a dataset, moved here or shared. Implicit on purpose: InitializeOptions{.training_data = dataset}.
  template <IndexedDataset Dataset>
  requires(!std::same_as<std::remove_cvref_t<Dataset>, TrainingData>)
      TrainingData(Dataset dataset)  // NOLINT(google-explicit-constructor)
      : TrainingData(std::make_shared<Dataset>(std::move(dataset))) {}

  template <IndexedDataset Dataset>
  TrainingData(std::shared_ptr<Dataset> dataset) {  // NOLINT(google-explicit-constructor)
    if (!dataset) return;
    size_ = size_of(dataset->size());
    get_ = [dataset = std::move(dataset)](int64_t index) {
      auto example = dataset->get(static_cast<size_t>(index));
      if constexpr (requires {
                      { example.target } -> std::convertible_to<at::Tensor>;
                    }) {
        return Batch{std::move(example.data), std::move(example.target)};
      } else {
        return Batch{std::move(example.data), {}};
      }
    };
  }

  // False: no dataset was given.
  explicit operator bool() const { return static_cast<bool>(get_); }
  // Number of samples. Throws UsageError for a dataset that does not know its size.
  int64_t size() const;
  // Sample number `index`.
  Batch get(int64_t index) const { return get_(index); }

 private:
  template <class Size>
  static int64_t size_of(const Size& size) {
    if constexpr (requires { size.has_value(); }) {
      return size.has_value() ? static_cast<int64_t>(*size) : -1;
    } else {
      return static_cast<int64_t>(size);
    }
  }

  std::function<Batch(int64_t)> get_;
  int64_t size_ = 0;  // -1: unknown
};

// The same on all ranks, but for `rank` and `device`.
struct DataLoaderOptions {
  int64_t micro_batch_size = 1;  // samples of one batch of one rank
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1234;  // the same on every rank
  // Another order for each epoch, drawn from the seed; false: that of the dataset.
  bool shuffle = true;
  bool drop_last = false;        // dataloader_drop_last
  at::Device device = at::kCPU;  // where batches are delivered
};

// One rank's loader. Each loop goes from the current position to the end of the epoch; the next loop reshuffles. A loop
// that was left early is continued by the next one. Not thread safe.
class DataLoader {
 public:
  // Throws UsageError for an empty dataset, or one that does not know its size.
  DataLoader(TrainingData data, const DataLoaderOptions& options);
  ~DataLoader();

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    Iterator() = default;  // the end
    explicit Iterator(DataLoader* loader) : loader_(loader) { ++*this; }
    Batch& operator*() const { return loader_->batch_; }
    Batch* operator->() const { return &loader_->batch_; }
    Iterator& operator++() {
      if (!loader_->advance()) loader_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(const Iterator& other) const { return loader_ == other.loader_; }

   private:
    DataLoader* loader_ = nullptr;
  };

  // For a loop over what is left of the epoch.
  Iterator begin() { return Iterator(this); }
  Iterator end() { return {}; }

  // Batches of a whole epoch, the same on every rank.
  int64_t size() const;
  // Whether they all have as many samples; else the last one has less.
  bool has_equal_batches() const;
  // Epochs are counted from 0 and advance by themselves; this is for jumping.
  int64_t epoch() const;
  void set_epoch(int64_t epoch);
  // From the next batch on.
  void set_micro_batch_size(int64_t size);

  // Of the batch that was delivered last: the numbers of its samples in the dataset. Empty before the first.
  const std::vector<int64_t>& indices() const { return indices_; }
  // Batches so far.
  int64_t delivered() const { return delivered_; }

  // The position after the batch that was delivered last. A run may be resumed with another number of ranks.
  SamplerState state() const;
  void load_state(const SamplerState& state);

 private:
  // Loads the next batch; false at the end of the epoch.
  bool advance();

  TrainingData data_;
  at::Device device_;
  std::unique_ptr<DistributedSampler> sampler_;
  Batch batch_;
  std::vector<int64_t> indices_;  // of batch_
  int64_t delivered_ = 0;
};

}  // namespace ds::engine
