// Reads batches ahead of the program on worker threads, with the names of torch.utils.data.DataLoader.
//
// The loaders of dsengine/data_loader.h and dsengine/loader.h stand on it; a program sets ReadOptions and asks
// sample_generator() and worker_info() in a dataset.
//
// Nothing that is read depends on the number of workers: the sampler is asked in order by the thread that takes
// batches, and what a transform draws is a function of seed, epoch and sample (sample_generator()).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "dsengine/errors.h"

namespace ds::engine {
class BatchSampler;   // decides which samples a rank sees, in which order
struct SamplerState;  // a sampler's position
}  // namespace ds::engine

namespace ds::data {

// How batches are read.
struct ReadOptions {
  // Threads that read; the dataset's get() is called by all of them at once. 0: the thread that takes a batch reads it.
  int num_workers = 0;
  // Batches that are read, or being read, for each worker before they are taken; > 0. Memory for
  // num_workers * prefetch_factor batches.
  int prefetch_factor = 2;
  // Puts batches for the CPU into pinned memory; UsageError without an accelerator. Batches for an accelerator travel
  // by way of pinned memory in any case, to which the workers copy them.
  bool pin_memory = false;
  // true: workers go on from an epoch to the next one, whose first batches they read during the last ones of this.
  // false: their threads end with an epoch.
  bool persistent_workers = false;
  // false: a batch is given as soon as it is read, also before an earlier one that takes longer.
  bool in_order = true;
  // The longest wait for a batch of the workers, then UsageError; the batch may be asked for again. 0: no limit.
  std::chrono::milliseconds timeout{0};
  // Called by each worker with its number before it reads.
  std::function<void(int worker)> worker_init_fn = {};
};

// Says that a dataset or a collate function threw: the text has the sample, the epoch, the worker, the rank and the
// reason. std::rethrow_if_nested gives the exception itself.
class SampleError : public UsageError {
 public:
  using UsageError::UsageError;
};

// What the calling thread reads.
struct WorkerInfo {
  int id = 0;           // of the worker; 0 without workers
  int num_workers = 0;  // as in ReadOptions
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 0;
  int64_t epoch = 0;
  int64_t index = -1;  // of the sample; -1 in a collate function
};

// Empty where the calling thread reads nothing for a loader, as torch.utils.data.get_worker_info().
std::optional<WorkerInfo> worker_info();

// The generator of the sample that the calling thread reads: a function of the loader's seed, the epoch and the number
// of the sample, so a transform that draws from it gives the same on any number of workers and ranks, and after a
// resume: torch::rand({2}, ds::data::sample_generator()). Draws of LibTorch's default generator are not so: all threads
// share it. Throws UsageError where no sample is read.
at::Generator& sample_generator();

// Tells that the calling thread begins to read a sample, which errors will name; -1: it is done with reading samples.
// For whoever writes a loader.
void begin_sample(int64_t index);

// Brings batches to a device: stage() on the thread that reads, then deliver() on the thread that takes.
class Delivery {
 public:
  // Throws UsageError for pin_memory without an accelerator.
  Delivery(at::Device device, bool pin_memory);
  ~Delivery();
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  // Returns a copy in pinned memory, where that is wanted and the tensor is one that travels: on the host, strided,
  // without a graph. Else the tensor. Any thread.
  at::Tensor stage(const at::Tensor& tensor) const;
  // Returns what stage() gave on the device, for the calling thread's current stream. The host does not wait for the
  // device.
  at::Tensor deliver(const at::Tensor& staged);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// The iterator of a loader, which has advance(), to load the next batch (false at the end of the epoch), and current().
template <class Loader, class Batch>
class BatchIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using pointer = Batch*;
  using reference = Batch&;

  BatchIterator() = default;  // the end
  explicit BatchIterator(Loader* loader) : loader_(loader) { ++*this; }
  Batch& operator*() const { return loader_->current(); }
  Batch* operator->() const { return &loader_->current(); }
  BatchIterator& operator++() {
    if (!loader_->advance()) loader_ = nullptr;
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(const BatchIterator& other) const { return loader_ == other.loader_; }

 private:
  Loader* loader_ = nullptr;
};

// What a feed has to know beside the sampler.
struct FeedOptions {
  ReadOptions reading;
  int rank = 0;
  int world_size = 1;
};

// Gives the batches of a sampler in its order, read ahead by workers. What the sampler will ask for is learnt from a
// copy of it; a batch of the copy that does not come true (the batch size was changed, the sampler went elsewhere) is
// dropped. So the sampler itself always stands behind the last batch that was given, as a checkpoint needs it. One
// thread at a time.
class BatchFeed {
 public:
  using Value = std::shared_ptr<void>;
  // Reads a batch, on any thread: calls begin_sample() before each sample and begin_sample(-1) before collating.
  using Read = std::function<Value(const std::vector<int64_t>& indices)>;

  // Throws UsageError for options out of range.
  BatchFeed(std::shared_ptr<engine::BatchSampler> sampler, Read read, const FeedOptions& options);
  // Returns when the samples that workers are reading at the moment are read; the rest is dropped.
  ~BatchFeed();
  BatchFeed(const BatchFeed&) = delete;
  BatchFeed& operator=(const BatchFeed&) = delete;

  // Returns the next batch; null at the end of an epoch. Throws SampleError for a batch that could not be read (the
  // next call goes on behind it), and UsageError in a child of fork().
  Value next();
  // The numbers of the samples of the last batch.
  const std::vector<int64_t>& indices() const;
  // What the sampler says of its epochs.
  int64_t batches_per_epoch() const;
  int64_t epoch() const;
  void set_epoch(int64_t epoch);
  // The time that next() has spent, with what it read itself.
  std::chrono::nanoseconds waited() const;
  // The batches that are read, or being read.
  int64_t ahead() const;

  // The position behind the batches that were given, {"epoch", "next_sample", "seed", "ahead"}: `ahead` are those
  // batches that were given before an earlier one, counted from it. For samplers without a curriculum.
  nlohmann::json state_dict() const;
  // Throws UsageError for what state_dict() did not make.
  void load_state_dict(const nlohmann::json& state);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// The part of a stream of samples that a worker of a rank reads: the samples first, first + step, first + 2 step, ...
// of an epoch.
struct StreamPart {
  int64_t epoch = 0;
  int64_t first = 0;
  int64_t step = 1;
};

// Gives the batches of a stream: each worker reads a part of its own, and batches are put together in the order of the
// stream, so they do not depend on the number of workers. One thread at a time.
class StreamFeed {
 public:
  using Value = std::shared_ptr<void>;
  using Next = std::function<Value()>;                               // the next sample; null at the end
  using Open = std::function<Next(const StreamPart&)>;               // called by the worker
  using Collate = std::function<Value(std::vector<Value> samples)>;  // called by a worker

  struct Options {
    FeedOptions feed;
    uint64_t seed = 0;
    int64_t batch_size = 1;
    bool drop_last = false;
  };

  StreamFeed(Open open, Collate collate, const Options& options);
  ~StreamFeed();
  StreamFeed(const StreamFeed&) = delete;
  StreamFeed& operator=(const StreamFeed&) = delete;

  Value next();  // as BatchFeed's
  int64_t epoch() const;
  void set_epoch(int64_t epoch);  // the next batch is the first of `epoch`
  std::chrono::nanoseconds waited() const;
  // {"epoch", "next_sample", "seed"}; next_sample counts over all ranks.
  nlohmann::json state_dict() const;
  void load_state_dict(const nlohmann::json& state);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace ds::data
