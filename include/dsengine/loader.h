// A loader for batches of any structure, without an engine or beside one; page docs/data.md.
//
//   ds::data::Loader loader(dataset, {.batch_size = 32, .rank = rank, .world_size = ranks, .reading = {.num_workers =
//   4}}); for (auto& batch : loader) ...                      // one epoch; the next loop is the next one
//
// A dataset is indexed, with get(size_t) -> sample and size(), or a stream, with open(const StreamPart&) -> a function
// that gives std::optional<sample>. A sample is anything that dsengine/collate.h collates, or that the loader's collate
// function does.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsengine/collate.h"
#include "dsengine/read_ahead.h"

namespace ds::data {

// The order of an epoch: the numbers of its samples, for all ranks, any number of times each. A function of the epoch
// alone, alike on all ranks, so that a resumed run has it again.
using Order = std::function<std::vector<int64_t>(int64_t epoch)>;
// The batches of an epoch, for all ranks: batch b is rank (b mod ranks)'s. As Order otherwise.
using BatchOrder = std::function<std::vector<std::vector<int64_t>>(int64_t epoch)>;

struct LoaderOptions {
  int64_t batch_size = 1;  // samples in a batch of one rank
  int rank = 0;            // of the ranks that get other samples: Engine::dp_rank() and dp_world_size()
  int world_size = 1;
  uint64_t seed = 1234;  // equal on every rank
  bool shuffle = true;   // another order in each epoch, by the seed; not for streams
  // true: leaves an incomplete last batch out. false: it is shorter, and filled up to a multiple of world_size with the
  // first samples of the epoch; with `batches`, whole batches are left out or filled up. A stream is never filled up.
  bool drop_last = false;
  at::Device device = at::kCPU;  // where batches are delivered
  ReadOptions reading = {};
  Order order = {};         // a sampler of one's own, in the place of shuffle
  BatchOrder batches = {};  // a batch sampler of one's own, in the place of batch_size, shuffle and order
};

// Makes the sampler that the options describe. Throws UsageError for those out of range and those that contradict.
std::shared_ptr<engine::BatchSampler> make_sampler(const LoaderOptions& options, int64_t dataset_size);
// Throws UsageError for options that a stream does not have.
void require_stream_options(const LoaderOptions& options);

template <class Dataset>
concept StreamOfSamples = requires(Dataset& dataset, const StreamPart& part) {
  *dataset.open(part)();
};
template <class Dataset>
concept SamplesByNumber = !StreamOfSamples<Dataset> && requires(Dataset & dataset, size_t index) {
  dataset.get(index);
  dataset.size();
};

// The type of a dataset's samples.
template <class Dataset>
struct SampleOf;
template <SamplesByNumber Dataset>
struct SampleOf<Dataset> {
  using Type = std::remove_cvref_t<decltype(std::declval<Dataset&>().get(size_t{0}))>;
};
template <StreamOfSamples Dataset>
struct SampleOf<Dataset> {
  using Type = std::remove_cvref_t<decltype(*std::declval<Dataset&>().open(StreamPart())())>;
};
// The number of samples, from a number or an optional one; 0 where it is not known.
template <class Size>
int64_t number_of(const Size& size) {
  if constexpr (requires { size.has_value(); })
    return static_cast<int64_t>(size.value_or(0));
  else
    return static_cast<int64_t>(size);
}

// The default of a loader's collate function.
struct DefaultCollate {
  template <class Sample>
  CollatedType<Sample> operator()(std::vector<Sample> samples) const {
    return Collated<Sample>::of(std::move(samples), "the value");
  }
};

// Applies a function to every tensor of a batch, in place.
template <class T, class F>
void map_tensors(T& value, const F& function) {
  if constexpr (std::same_as<T, at::Tensor>) {
    value = function(value);
  } else if constexpr (std::same_as<T, c10::IValue>) {
    value = map_value(value, function);
  } else if constexpr (HasFields<T>) {
    std::apply([&](auto... member) { (map_tensors(value.*member, function), ...); }, T::fields());
  } else if constexpr (HasDataAndTarget<T>) {
    map_tensors(value.data, function);
    if constexpr (requires { value.target; }) map_tensors(value.target, function);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& entry : value) map_tensors(entry.second, function);
  } else if constexpr (std::is_arithmetic_v<T> || requires { value.c_str(); }) {
    return;
  } else if constexpr (requires { value.begin(); }) {
    for (auto& element : value) map_tensors(element, function);
  } else if constexpr (requires { std::tuple_size<T>{}; }) {
    std::apply([&](auto&... elements) { (map_tensors(elements, function), ...); }, value);
  }
}

// One rank's loader. Each loop goes from the current position to the end of the epoch; one that was left early is
// continued by the next. Batches, in order, are the same for any number of workers. One thread uses it, and the dataset
// and the collate function are called by all workers at once. Throws UsageError for options out of range, and
// SampleError for what the dataset throws.
template <class Dataset, class Collate = DefaultCollate>
class Loader {
  static_assert(SamplesByNumber<Dataset> || StreamOfSamples<Dataset>,
                "expected a dataset with get(size_t) and size(), or one with open(const StreamPart&), which gives a "
                "function that gives std::optional<sample>");
  static constexpr bool kIsStream = StreamOfSamples<Dataset>;

 public:
  using Sample = typename SampleOf<Dataset>::Type;
  using Batch = std::remove_cvref_t<std::invoke_result_t<const Collate&, std::vector<Sample>>>;

  Loader(std::shared_ptr<Dataset> dataset, const LoaderOptions& options, Collate collate = {})
      : parts_(std::make_shared<Parts>(std::move(dataset), std::move(collate), options)) {
    if constexpr (kIsStream) {
      require_stream_options(options);
      feed_ = std::make_unique<Feed>(
          [parts = parts_](const StreamPart& part) { return opened(*parts, part); },
          [parts = parts_](const std::vector<Value>& values) { return collated_stream(*parts, values); },
          StreamFeed::Options{.feed = {options.reading, options.rank, options.world_size},
                              .seed = options.seed,
                              .batch_size = options.batch_size,
                              .drop_last = options.drop_last});
    } else {
      feed_ = std::make_unique<Feed>(
          make_sampler(options, number_of(parts_->dataset->size())),
          [parts = parts_](const std::vector<int64_t>& indices) { return collated(*parts, indices); },
          FeedOptions{options.reading, options.rank, options.world_size});
    }
  }
  Loader(Dataset dataset, const LoaderOptions& options, Collate collate = {})
      : Loader(std::make_shared<Dataset>(std::move(dataset)), options, std::move(collate)) {}

  using Iterator = BatchIterator<Loader, Batch>;
  Iterator begin() { return Iterator(this); }
  Iterator end() { return {}; }

  // The number of batches in an epoch, equal on every rank.
  int64_t size() const requires(!kIsStream) { return feed_->batches_per_epoch(); }
  // The numbers of the samples of the last batch.
  const std::vector<int64_t>& indices() const requires(!kIsStream) { return feed_->indices(); }
  int64_t epoch() const { return feed_->epoch(); }
  // Makes the next batch the first of `epoch`. Epochs go on by themselves; this is for jumping.
  void set_epoch(int64_t epoch) { feed_->set_epoch(epoch); }
  // The time that loops have waited for batches so far.
  std::chrono::nanoseconds waited() const { return feed_->waited(); }
  // The position behind the last batch, of all ranks: for SaveOptions::client_state. A loader with another number of
  // ranks or workers, or another batch size, may take it up; with `batches` the number of ranks stays. With in_order =
  // false it is this rank's own (SaveOptions::rank_state), for the same ranks and batch size.
  nlohmann::json state_dict() const { return feed_->state_dict(); }
  // Goes to a position; parts of a stream then begin there.
  void load_state_dict(const nlohmann::json& state) { feed_->load_state_dict(state); }

 private:
  friend Iterator;
  Batch& current() { return *batch_; }
  using Value = std::shared_ptr<void>;
  using Feed = std::conditional_t<kIsStream, StreamFeed, BatchFeed>;
  struct Parts {
    Parts(std::shared_ptr<Dataset> data, Collate function, const LoaderOptions& options)
        : dataset(std::move(data)),
          collate(std::move(function)),
          delivery(options.device, options.reading.pin_memory) {}
    std::shared_ptr<Dataset> dataset;
    Collate collate;
    Delivery delivery;
  };

  static Value staged(Parts& parts, std::vector<Sample> samples) {
    begin_sample(-1);
    auto batch = std::make_shared<Batch>(parts.collate(std::move(samples)));
    map_tensors(*batch, [&](const at::Tensor& tensor) { return parts.delivery.stage(tensor); });
    return batch;
  }
  static Value collated(Parts& parts, const std::vector<int64_t>& indices) {
    std::vector<Sample> samples;
    samples.reserve(indices.size());
    for (const int64_t index : indices) {
      begin_sample(index);
      samples.push_back(parts.dataset->get(static_cast<size_t>(index)));
    }
    return staged(parts, std::move(samples));
  }
  static Value collated_stream(Parts& parts, const std::vector<Value>& values) {
    std::vector<Sample> samples;
    samples.reserve(values.size());
    for (const Value& value : values) samples.push_back(std::move(*static_cast<Sample*>(value.get())));
    return staged(parts, std::move(samples));
  }
  static StreamFeed::Next opened(Parts& parts, const StreamPart& part) requires kIsStream {
    auto next = std::make_shared<decltype(parts.dataset->open(part))>(parts.dataset->open(part));
    return [next]() -> Value {
      auto sample = (*next)();
      return sample ? std::make_shared<Sample>(std::move(*sample)) : Value();
    };
  }
  // Loads the next batch; false at the end of the epoch.
  bool advance() {
    batch_ = std::static_pointer_cast<Batch>(feed_->next());
    if (!batch_) return false;
    map_tensors(*batch_, [&](const at::Tensor& tensor) { return parts_->delivery.deliver(tensor); });
    return true;
  }

  std::shared_ptr<Parts> parts_;
  std::shared_ptr<Batch> batch_;
  std::unique_ptr<Feed> feed_;
};

}  // namespace ds::data
