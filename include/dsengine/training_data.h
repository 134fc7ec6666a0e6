// Any torch::data dataset, as the engine's loader reads it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace ds::engine {

// One sample, or samples stacked along dimension 0. `target` is undefined for datasets without one.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

// A dataset that gives sample number i as torch::data::Example<> (anything with a tensor `data`, and maybe `target`)
// and knows its size (a number, or an optional number as in torch::data::datasets::Dataset).
template <class Dataset>
concept IndexedDataset = requires(Dataset& dataset, size_t index) {
  { dataset.get(index).data } -> std::convertible_to<at::Tensor>;
  dataset.size();
};

// The two forms of a batch that get_batch() of a dataset may return: one example whose tensors have a first dimension
// for the samples (Stack), or a list of examples.
template <class Batch>
concept CollatedBatch = requires(Batch& batch) {
  { batch.data } -> std::convertible_to<at::Tensor>;
};
template <class Batch>
concept ListedBatch = requires(Batch& batch) {
  { batch.at(0).data } -> std::convertible_to<at::Tensor>;
  batch.size();
};

// A dataset that takes a list of sample numbers, as .map() of torch::data makes one. The loader asks for one number at
// a time, so a transform sees batches of one sample.
template <class Dataset>
concept BatchedDataset = !IndexedDataset<Dataset> && requires(Dataset & dataset, c10::ArrayRef<size_t> indices) {
  requires CollatedBatch<decltype(dataset.get_batch(indices))> || ListedBatch<decltype(dataset.get_batch(indices))>;
  dataset.size();
};

// A dataset that the loader can read.
template <class Dataset>
concept UsableDataset = IndexedDataset<Dataset> || BatchedDataset<Dataset>;

// Returns the sample of a batch of one, without dimension 0. Throws UsageError where that dimension is not 1 long.
at::Tensor only_sample(const at::Tensor& batch);

// Holds any usable dataset; empty by default. Copies share the dataset.
class TrainingData {
 public:
  TrainingData() = default;

  // Holds a dataset, moved here or shared. Implicit on purpose: InitializeOptions{.training_data = dataset}.
  template <UsableDataset Dataset>
  requires(!std::same_as<std::remove_cvref_t<Dataset>, TrainingData>)
      TrainingData(Dataset dataset)  // NOLINT(google-explicit-constructor)
      : TrainingData(std::make_shared<Dataset>(std::move(dataset))) {}

  template <UsableDataset Dataset>
  TrainingData(std::shared_ptr<Dataset> dataset) {  // NOLINT(google-explicit-constructor)
    if (!dataset) return;
    size_ = size_of(dataset->size());
    get_ = [dataset = std::move(dataset)](int64_t index) { return sample_of(*dataset, static_cast<size_t>(index)); };
  }

  // Rejects any other dataset with a sentence that says what is expected.
  template <class Dataset>
  requires(!UsableDataset<Dataset> && !std::same_as<std::remove_cvref_t<Dataset>, TrainingData> &&
           requires(Dataset & dataset) { dataset.size(); })
      TrainingData(Dataset)  // NOLINT(google-explicit-constructor)
  {
    static_assert(UsableDataset<Dataset>,
                  ".training_data: expected a dataset with size() and either get(size_t) or "
                  "get_batch(ArrayRef<size_t>), which gives examples with a tensor `data` and perhaps a tensor "
                  "`target`. One that gives something else, or that keeps a position of its own (StreamDataset, "
                  "ChunkDataset), is read by a loader of your own, torch::data::make_data_loader for example: the "
                  "engine works with any");
  }

  // Whether a dataset was given.
  explicit operator bool() const { return static_cast<bool>(get_); }
  // The number of samples. Throws UsageError for a dataset that does not know its size.
  int64_t size() const;
  Batch get(int64_t index) const { return get_(index); }

 private:
  template <class Example>
  static Batch tensors_of(Example&& example) {
    if constexpr (requires {
                    { example.target } -> std::convertible_to<at::Tensor>;
                  }) {
      return Batch{std::move(example.data), std::move(example.target)};
    } else {
      return Batch{std::move(example.data), {}};
    }
  }

  template <class Dataset>
  static Batch sample_of(Dataset& dataset, size_t index) {
    if constexpr (IndexedDataset<Dataset>) {
      return tensors_of(dataset.get(index));
    } else {
      auto batch = dataset.get_batch(c10::ArrayRef<size_t>(index));
      if constexpr (CollatedBatch<decltype(batch)>) {
        const Batch one = tensors_of(std::move(batch));
        return {only_sample(one.data), only_sample(one.target)};
      } else {
        return tensors_of(std::move(batch.at(0)));
      }
    }
  }

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

}  // namespace ds::engine
