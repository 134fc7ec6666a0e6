// The samplers of ds::data::Loader.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "data/distributed_sampler.h"
#include "dsengine/loader.h"

namespace ds::data {
namespace {

using engine::SamplerState;

// Deals batches that the program has put together. `next_sample` of its state counts batches.
class ListedBatches : public engine::BatchSampler {
 public:
  ListedBatches(const LoaderOptions& options, int64_t dataset_size)
      : batches_(options.batches),
        rank_(options.rank),
        world_size_(options.world_size),
        drop_last_(options.drop_last),
        dataset_size_(dataset_size) {
    state_.seed = options.seed;
  }

  std::unique_ptr<BatchSampler> copy() const override { return std::make_unique<ListedBatches>(*this); }

  std::vector<int64_t> next_batch() override {
    const auto& batches = batches_of(state_.epoch);
    if (state_.next_sample >= rounds() * world_size_) {
      state_.next_sample = 0;
      ++state_.epoch;
      return {};
    }
    const auto place = static_cast<size_t>(state_.next_sample + rank_) % batches.size();
    state_.next_sample += world_size_;
    return batches[place];
  }
  int64_t dataset_size() const override { return dataset_size_; }
  int64_t batches_per_epoch() const override { return rounds(); }
  bool has_equal_batches() const override {
    const auto& batches = batches_of(state_.epoch);
    return std::all_of(batches.begin(), batches.end(),
                       [&](const auto& batch) { return batch.size() == batches.front().size(); });
  }

  void set_epoch(int64_t epoch) override {
    require(epoch >= 0, "sampler: expected an epoch from 0 up, found ", epoch);
    state_.epoch = epoch;
    state_.next_sample = 0;
  }
  void set_batch_size(int64_t) override {
    throw UsageError("sampler: the size of batches that `batches` lists cannot be set; list others");
  }
  void set_accumulation(int64_t) override {}

  const SamplerState& state() const override { return state_; }
  void load_state(const SamplerState& state) override {
    require(!state.curriculum && state.epoch >= 0 && state.next_sample >= 0 && state.next_sample % world_size_ == 0,
            "sampler: cannot go on at batch ", state.next_sample, " of epoch ", state.epoch, " on ", world_size_,
            " ranks; resume with the ranks and the batches that the state was saved with");
    state_ = state;
  }

 private:
  // The batches of this rank in the present epoch.
  int64_t rounds() const {
    const auto count = static_cast<int64_t>(batches_of(state_.epoch).size());
    return drop_last_ ? count / world_size_ : (count + world_size_ - 1) / world_size_;
  }
  const std::vector<std::vector<int64_t>>& batches_of(int64_t epoch) const {
    if (listed_epoch_ == epoch) return *listed_;
    auto listed = std::make_shared<const std::vector<std::vector<int64_t>>>(batches_(epoch));
    require(!listed->empty() && (!drop_last_ || static_cast<int64_t>(listed->size()) >= world_size_), "sampler: epoch ",
            epoch, " has ", listed->size(), " batches for ", world_size_,
            " ranks; expected one at least, and with drop_last one for each rank");
    for (const std::vector<int64_t>& batch : *listed) {
      const bool is_right = !batch.empty() && std::all_of(batch.begin(), batch.end(), [this](int64_t sample) {
        return sample >= 0 && sample < dataset_size_;
      });
      require(is_right, "sampler: expected batches of samples below ", dataset_size_,
              ", the size of the dataset; one of epoch ", epoch, " is empty or has another number");
    }
    listed_ = std::move(listed);
    listed_epoch_ = epoch;
    return *listed_;
  }

  BatchOrder batches_;
  int64_t rank_;
  int64_t world_size_;
  bool drop_last_;
  int64_t dataset_size_;
  SamplerState state_;
  // The batches that were asked for last, and their epoch.
  mutable std::shared_ptr<const std::vector<std::vector<int64_t>>> listed_;
  mutable int64_t listed_epoch_ = -1;
};

}  // namespace

std::shared_ptr<engine::BatchSampler> make_sampler(const LoaderOptions& options, int64_t dataset_size) {
  require(!options.order || !options.batches,
          "data loader: expected at most one of `order` and `batches`, found both; batches have an order of their own");
  require(!options.batches || options.batch_size == 1,
          "data loader: `batches` lists whole batches, found batch_size = ", options.batch_size, "; leave it out");
  if (options.batches) return std::make_shared<ListedBatches>(options, dataset_size);
  return std::make_shared<engine::DistributedSampler>(engine::SamplerOptions{.dataset_size = dataset_size,
                                                                             .batch_size = options.batch_size,
                                                                             .rank = options.rank,
                                                                             .world_size = options.world_size,
                                                                             .seed = options.seed,
                                                                             .shuffle = options.shuffle,
                                                                             .drop_last = options.drop_last,
                                                                             .order = options.order});
}

void require_stream_options(const LoaderOptions& options) {
  require(!options.order && !options.batches,
          "data loader: a stream has its own order, found `order` or `batches`; give a dataset with get() and size()");
}

}  // namespace ds::data
