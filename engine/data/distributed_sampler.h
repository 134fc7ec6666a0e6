// Which samples a rank sees, in which order. Torch-free.
//
// Every epoch is a permutation of the dataset, the same on all ranks and platforms: position p of epoch e holds sample
// permute(seed, e, N)(p), a Feistel network over the smallest even power of two that holds N, walked until it lands
// below N (Black and Rogaway, "Ciphers with arbitrary finite domains"), with SplitMix64 as its round function. It needs
// no table, so a dataset of any size costs nothing at start and a position is resumed without replaying the ones before
// it.
//
// Positions are dealt as torch's DistributedSampler deals them: batch by batch, position p goes to rank p mod W. The
// state is a *global* position, so a run may be resumed with another number of ranks and goes on at the same sample.
#pragma once

#include <cstdint>
#include <vector>

namespace ds::engine {

// A pseudo-random permutation of [0, size), computed position by position.
class Permutation {
 public:
  // `size` > 0.
  Permutation(uint64_t seed, uint64_t epoch, int64_t size);
  // 0 <= position < size.
  int64_t operator()(int64_t position) const;

 private:
  uint64_t encrypt(uint64_t value) const;

  static constexpr int kRounds = 8;
  uint64_t keys_[kRounds];
  int half_bits_;
  int64_t size_;
};

struct SamplerOptions {
  int64_t dataset_size = 0;  // samples; > 0
  int64_t batch_size = 1;    // samples of one rank in one batch; > 0
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1234;
  bool shuffle = true;     // false: samples in their own order
  bool drop_last = false;  // true: an incomplete last (global) batch is left out; false: it is shorter, and filled up
                           // to a multiple of world_size with the first samples of the epoch, as torch does
};

// Where a sampler stands; what a checkpoint stores.
struct SamplerState {
  int64_t epoch = 0;        // from 0
  int64_t next_sample = 0;  // position inside the epoch, counted over all ranks
  uint64_t seed = 1234;

  bool operator==(const SamplerState&) const = default;
};

// Not thread safe.
class DistributedSampler {
 public:
  // Throws UsageError for sizes and ranks out of range, and for drop_last with less than one global batch.
  explicit DistributedSampler(const SamplerOptions& options);

  // Indices of this rank's next batch. Empty when the epoch is over: the call after that begins the next epoch.
  std::vector<int64_t> next_batch();
  // Batches that are left in this epoch (the same number on every rank).
  int64_t batches_left() const;
  // Batches of a whole epoch.
  int64_t batches_per_epoch() const;
  // Whether all batches of a whole epoch have as many samples; the last one may have less.
  bool has_equal_batches() const;

  // Takes effect at the next batch, which is the first of `epoch`. Epochs advance by themselves; this is for jumping.
  void set_epoch(int64_t epoch);
  // For a new number of samples per batch, from the next batch on.
  void set_batch_size(int64_t batch_size);

  SamplerState state() const { return state_; }
  // Throws UsageError when the position lies outside this dataset.
  void load_state(const SamplerState& state);

 private:
  // UsageError when drop_last would drop everything.
  void require_a_batch(int64_t batch_size) const;
  int64_t batches_after(int64_t position) const;
  int64_t global_batch() const { return options_.batch_size * options_.world_size; }

  SamplerOptions options_;
  SamplerState state_;
};

}  // namespace ds::engine
