// The exponential moving average of the weights that this rank updates (dsengine/ema.h).
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

// Throws ConfigError for values out of range, and for a model whose plan keeps masters where, or updates them as, no
// average can follow. `options` ask for an average.
void require_ema(const ModelState& state, const EmaOptions& options);

// Holds, for each trainable bucket, a flat tensor with an element for each of the bucket's master, beside that master:
// on the device, or in host memory where the optimizer is offloaded. Used by the engine's thread.
class WeightAverage {
 public:
  // Takes memory, and begins with the masters as they are. `state` outlives it. Collective: throws ConfigError on all
  // ranks where a host has no room for what its ranks offload.
  WeightAverage(const ModelState& state, const EmaOptions& options);

  // Adds the masters, which an update has changed. `skip`: StepScale::skip of that update, by which the device says
  // that the step changes nothing; the host learns it later, and calls take_back_update() then.
  void update(const at::Tensor& skip);
  void take_back_update() { --updates_; }
  // Lets the average begin again with the masters as they are.
  void begin_anew();

  // The averages of a bucket: float32, or float64 for float64 masters.
  const at::Tensor& values(size_t bucket) const { return values_.at(bucket); }
  // The number of updates so far.
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  // Returns the bytes on the device, or those in host memory beside offloaded masters.
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
