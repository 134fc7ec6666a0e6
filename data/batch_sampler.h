// Which samples a rank sees, in which order, and where it stands. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/curriculum_position.h"

namespace ds::engine {

// The position of a sampler, as a checkpoint stores it.
struct SamplerState {
  int64_t epoch = 0;        // counts from 0
  int64_t next_sample = 0;  // position inside the epoch, counted over all ranks
  uint64_t seed = 1234;
  std::optional<efficiency::CurriculumPosition> curriculum = {};  // the position of a curriculum of samples

  bool operator==(const SamplerState&) const = default;
};

// Returns a digest for ranks to compare: states that differ have other digests.
uint64_t digest_of(const SamplerState& state);

// Chooses the samples of each batch of this rank.
class BatchSampler {
 public:
  virtual ~BatchSampler() = default;

  // Returns a sampler that stands where this one does and goes on by itself. It writes nothing to the log.
  virtual std::unique_ptr<BatchSampler> copy() const = 0;

  // Returns the indices of this rank's next batch. Empty when the epoch is over: the call after that begins the next
  // epoch.
  virtual std::vector<int64_t> next_batch() = 0;
  // The number of samples of which batches are made.
  virtual int64_t dataset_size() const = 0;
  // The number of batches of a whole epoch, the same number on every rank.
  virtual int64_t batches_per_epoch() const = 0;
  // Whether all batches of a whole epoch have as many samples; the last one may have less.
  virtual bool has_equal_batches() const = 0;

  // Makes the next batch the first of `epoch`.
  virtual void set_epoch(int64_t epoch) = 0;
  // Set a new number of samples per batch, or of batches per step, from the next one on.
  virtual void set_batch_size(int64_t batch_size) = 0;
  virtual void set_accumulation(int64_t batches) = 0;

  virtual const SamplerState& state() const = 0;
  // Goes to the position. Throws UsageError, and changes nothing, for a state of other data or of another sampler.
  virtual void load_state(const SamplerState& state) = 0;
};

}  // namespace ds::engine
