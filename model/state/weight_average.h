// The exponential moving average of the weights that this rank updates. Its formula is in dsengine/ema.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dsengine/ema.h"

namespace ds::engine {

struct ModelState;

// Returns lines "what<TAB>value" of the options, for require_same_on_all_ranks().
std::string ema_lines(const EmaOptions& options);

// Throws ConfigError for options out of range, and for a plan under which no average can be kept: without an optimizer,
// with masters in files (offload_optimizer "nvme"), and with ZeroOneAdam. `options.decay` is not 0.
void require_ema(const ModelState& state, const EmaOptions& options);

// Holds a flat tensor for each trainable bucket, of the size of the bucket's master and in the same memory: on the
// device, or in host memory where the optimizer is offloaded. Used by the engine's thread.
class WeightAverage {
 public:
  // Allocates the averages and sets them to the masters. `state` outlives it. Collective: throws ConfigError on all
  // ranks where a host has no room for the averages of its ranks, or a rank could not allocate its own.
  WeightAverage(const ModelState& state, const EmaOptions& options);

  // Moves the averages towards the masters, which an update has changed. `skip`: StepScale::skip of that update; where
  // it is not zero the averages stay as they are. Undefined: the step is not skipped.
  void update(const at::Tensor& skip);
  // Takes the last update out of the count, once the host has learned that the device skipped it.
  void take_back_update() { --updates_; }

  // The averages of a bucket: float32, or float64 for float64 masters.
  const at::Tensor& values(size_t bucket) const { return values_.at(bucket); }
  // The number of updates that the averages have had, across checkpoints.
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  // Returns the bytes of the averages in host memory beside offloaded masters, or else of those on the device.
  int64_t bytes(bool in_host_memory) const;

 private:
  // Calls `use` with the master of a bucket while it is in memory.
  void read_master(size_t bucket, const std::function<void(const at::Tensor& master)>& use) const;
  // Returns the decay of update number `update`, from 1.
  double decay_of(int64_t update) const;

  const ModelState& state_;
  EmaOptions options_;
  int64_t updates_ = 0;
  std::vector<at::Tensor> values_;
};

}  // namespace ds::engine
