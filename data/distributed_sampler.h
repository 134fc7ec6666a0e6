// Which samples a rank sees, in which order. Torch-free.
//
// Every epoch is a permutation of the dataset, the same on all ranks and platforms: position p of epoch e holds sample
// Permutation(seed, e, N)(p). It needs no table, so a dataset of any size costs nothing at start and a position is
// resumed without replaying the ones before it.
//
// Positions are dealt as torch's DistributedSampler deals them: batch by batch, position p goes to rank p mod W. The
// state is a *global* position, so a run may be resumed with another number of ranks and goes on at the same sample.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "data/batch_sampler.h"

namespace ds::engine {

// The order of an epoch: the numbers of its samples, for all ranks. A function of the epoch alone.
using EpochOrder = std::function<std::vector<int64_t>(int64_t epoch)>;

struct SamplerOptions {
  int64_t dataset_size = 0;  // samples; > 0
  int64_t batch_size = 1;    // samples of one rank in one batch; > 0
  int rank = 0;
  int world_size = 1;
  uint64_t seed = 1234;
  bool shuffle = true;     // false: samples in their own order
  bool drop_last = false;  // true: an incomplete last (global) batch is left out; false: it is shorter, and filled up
                           // to a multiple of world_size with the first samples of the epoch, as torch does
  EpochOrder order = {};   // in the place of shuffle; asked once for each epoch by each copy
};

// Not thread safe.
class DistributedSampler : public BatchSampler {
 public:
  // Throws UsageError for sizes and ranks out of range, and for drop_last with less than one global batch.
  explicit DistributedSampler(const SamplerOptions& options);

  std::unique_ptr<BatchSampler> copy() const override { return std::make_unique<DistributedSampler>(*this); }
  // Throws UsageError for an order with a number that is no sample's, or with less than a batch.
  std::vector<int64_t> next_batch() override;
  int64_t dataset_size() const override { return options_.dataset_size; }
  // Batches that are left in this epoch (the same number on every rank).
  int64_t batches_left() const;
  int64_t batches_per_epoch() const override;
  bool has_equal_batches() const override;

  // Takes effect at the next batch, which is the first of `epoch`. Epochs advance by themselves; this is for jumping.
  void set_epoch(int64_t epoch) override;
  void set_batch_size(int64_t batch_size) override;
  void set_accumulation(int64_t) override {}

  const SamplerState& state() const override { return state_; }
  // Throws UsageError when the position lies outside this dataset, or is of a curriculum.
  void load_state(const SamplerState& state) override;

 private:
  // UsageError when drop_last would drop everything.
  void require_a_batch(int64_t samples, int64_t batch_size) const;
  // The order of an epoch; null without an order of the program's.
  const std::vector<int64_t>* order_of(int64_t epoch) const;
  // The number of samples in an epoch.
  int64_t samples_of(int64_t epoch) const;
  int64_t batches_after(int64_t position) const;
  int64_t global_batch() const { return options_.batch_size * options_.world_size; }

  SamplerOptions options_;
  SamplerState state_;
  // The order that was asked for last, and its epoch.
  mutable std::shared_ptr<const std::vector<int64_t>> order_;
  mutable int64_t ordered_epoch_ = -1;
};

}  // namespace ds::engine
