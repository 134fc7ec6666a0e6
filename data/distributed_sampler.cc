#include "data/distributed_sampler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "data/permutation.h"

namespace ds::engine {
DistributedSampler::DistributedSampler(const SamplerOptions& options) : options_(options) {
  require(options.dataset_size > 0, "sampler: expected a dataset with at least one sample, found ",
          options.dataset_size);
  require(options.batch_size > 0, "sampler: expected a positive batch size, found ", options.batch_size);
  require(options.world_size > 0 && options.rank >= 0 && options.rank < options.world_size,
          "sampler: expected 0 <= rank < world_size, found rank ", options.rank, " of ", options.world_size);
  if (!options.order) require_a_batch(options.dataset_size, options.batch_size);
  state_.seed = options.seed;
}

const std::vector<int64_t>* DistributedSampler::order_of(int64_t epoch) const {
  if (!options_.order) return nullptr;
  if (ordered_epoch_ == epoch) return order_.get();
  auto order = std::make_shared<const std::vector<int64_t>>(options_.order(epoch));
  require(!order->empty(), "sampler: the order of epoch ", epoch, " has no samples; expected one at least");
  for (const int64_t sample : *order) {
    require(sample >= 0 && sample < options_.dataset_size, "sampler: the order of epoch ", epoch, " has sample ",
            sample, "; expected numbers below ", options_.dataset_size, ", the size of the dataset");
  }
  require_a_batch(static_cast<int64_t>(order->size()), options_.batch_size);
  order_ = std::move(order);
  ordered_epoch_ = epoch;
  return order_.get();
}

int64_t DistributedSampler::samples_of(int64_t epoch) const {
  const std::vector<int64_t>* order = order_of(epoch);
  return order ? static_cast<int64_t>(order->size()) : options_.dataset_size;
}

std::vector<int64_t> DistributedSampler::next_batch() {
  if (batches_left() == 0) {
    state_.next_sample = 0;
    ++state_.epoch;
    return {};
  }
  const std::vector<int64_t>* order = order_of(state_.epoch);
  const int64_t size = samples_of(state_.epoch);
  const int64_t left = size - state_.next_sample;
  const int64_t count = std::min(options_.batch_size, (left + options_.world_size - 1) / options_.world_size);
  const Permutation permutation(state_.seed, static_cast<uint64_t>(state_.epoch), size);
  std::vector<int64_t> indices(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = (state_.next_sample + i * options_.world_size + options_.rank) % size;
    const int64_t shuffled = options_.shuffle ? permutation(position) : position;
    indices[static_cast<size_t>(i)] = order ? (*order)[static_cast<size_t>(position)] : shuffled;
  }
  state_.next_sample = std::min(state_.next_sample + global_batch(), size);
  return indices;
}

int64_t DistributedSampler::batches_after(int64_t position) const {
  const int64_t left = samples_of(state_.epoch) - position;
  return options_.drop_last ? left / global_batch() : (left + global_batch() - 1) / global_batch();
}

int64_t DistributedSampler::batches_left() const { return batches_after(state_.next_sample); }

int64_t DistributedSampler::batches_per_epoch() const { return batches_after(0); }

bool DistributedSampler::has_equal_batches() const {
  const int64_t rest = samples_of(state_.epoch) % global_batch();
  const int64_t last = (rest + options_.world_size - 1) / options_.world_size;
  return options_.drop_last || batches_per_epoch() == 1 || last % options_.batch_size == 0;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  require(epoch >= 0, "sampler: expected an epoch from 0 up, found ", epoch);
  state_.epoch = epoch;
  state_.next_sample = 0;
}

void DistributedSampler::set_batch_size(int64_t batch_size) {
  require(batch_size > 0, "sampler: expected a positive batch size, found ", batch_size);
  require_a_batch(samples_of(state_.epoch), batch_size);
  options_.batch_size = batch_size;
}

void DistributedSampler::require_a_batch(int64_t samples, int64_t batch_size) const {
  require(!options_.drop_last || samples >= batch_size * options_.world_size, "sampler: drop_last with ", samples,
          " samples leaves no batch of ", batch_size, " x ", options_.world_size,
          " ranks; use a smaller batch or set dataloader_drop_last to false");
}

void DistributedSampler::load_state(const SamplerState& state) {
  require(!state.curriculum, "sampler: cannot go on where a curriculum of samples (data_efficiency.data_sampling) was ",
          "left; resume with the config that the state was saved with");
  const int64_t samples = state.epoch >= 0 ? samples_of(state.epoch) : 0;
  require(state.epoch >= 0 && state.next_sample >= 0 && state.next_sample <= samples,
          "sampler: cannot go on at sample ", state.next_sample, " of epoch ", state.epoch, ": this dataset has ",
          samples, " samples; resume with the dataset the state was saved with");
  state_ = state;
}

}  // namespace ds::engine
