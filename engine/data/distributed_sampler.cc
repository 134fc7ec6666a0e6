#include "engine/data/distributed_sampler.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace ds::engine {
namespace {

// SplitMix64 (Steele, Lea and Flood 2014): one output for the state `z`.
uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace

Permutation::Permutation(uint64_t seed, uint64_t epoch, int64_t size) : size_(size) {
  require(size > 0, "permutation: expected at least one sample, found ", size);
  const int bits = std::bit_width(static_cast<uint64_t>(size - 1));
  half_bits_ = std::max(1, (bits + 1) / 2);
  uint64_t key = splitmix64(seed) ^ splitmix64(~epoch);
  for (uint64_t& round_key : keys_) round_key = key = splitmix64(key);
}

uint64_t Permutation::encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (const uint64_t key : keys_) {
    const uint64_t next = left ^ (splitmix64(right ^ key) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t position) const {
  auto value = static_cast<uint64_t>(position);
  do {
    value = encrypt(value);
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

DistributedSampler::DistributedSampler(const SamplerOptions& options) : options_(options) {
  require(options.dataset_size > 0, "sampler: expected a dataset with at least one sample, found ",
          options.dataset_size);
  require(options.batch_size > 0, "sampler: expected a positive batch size, found ", options.batch_size);
  require(options.world_size > 0 && options.rank >= 0 && options.rank < options.world_size,
          "sampler: expected 0 <= rank < world_size, found rank ", options.rank, " of ", options.world_size);
  require_a_batch(options.batch_size);
  state_.seed = options.seed;
}

std::vector<int64_t> DistributedSampler::next_batch() {
  if (batches_left() == 0) {
    state_.next_sample = 0;
    ++state_.epoch;
    return {};
  }
  const int64_t size = options_.dataset_size;
  const int64_t left = size - state_.next_sample;
  const int64_t count = std::min(options_.batch_size, (left + options_.world_size - 1) / options_.world_size);
  const Permutation permutation(state_.seed, static_cast<uint64_t>(state_.epoch), size);
  std::vector<int64_t> indices(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = (state_.next_sample + i * options_.world_size + options_.rank) % size;
    indices[static_cast<size_t>(i)] = options_.shuffle ? permutation(position) : position;
  }
  state_.next_sample = std::min(state_.next_sample + global_batch(), size);
  return indices;
}

int64_t DistributedSampler::batches_after(int64_t position) const {
  const int64_t left = options_.dataset_size - position;
  return options_.drop_last ? left / global_batch() : (left + global_batch() - 1) / global_batch();
}

int64_t DistributedSampler::batches_left() const { return batches_after(state_.next_sample); }

int64_t DistributedSampler::batches_per_epoch() const { return batches_after(0); }

bool DistributedSampler::has_equal_batches() const {
  const int64_t rest = options_.dataset_size % global_batch();
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
  require_a_batch(batch_size);
  options_.batch_size = batch_size;
}

void DistributedSampler::require_a_batch(int64_t batch_size) const {
  require(!options_.drop_last || options_.dataset_size >= batch_size * options_.world_size, "sampler: drop_last with ",
          options_.dataset_size, " samples leaves no batch of ", batch_size, " x ", options_.world_size,
          " ranks; use a smaller batch or set dataloader_drop_last to false");
}

void DistributedSampler::load_state(const SamplerState& state) {
  require(state.epoch >= 0 && state.next_sample >= 0 && state.next_sample <= options_.dataset_size,
          "sampler: cannot go on at sample ", state.next_sample, " of epoch ", state.epoch, ": this dataset has ",
          options_.dataset_size, " samples; resume with the dataset the state was saved with");
  state_ = state;
}

}  // namespace ds::engine
