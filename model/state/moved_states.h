// Frees device memory between two steps: moves state to host memory until it is brought back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "model/state/model_state.h"
#include "offload/pinned_arena.h"

namespace ds::engine {

// Which state of this rank is moved off the device.
struct MovedParts {
  bool optimizer = true;   // its states
  bool masters = true;     // where they are not the parameters themselves
  bool parameters = true;  // trainable and frozen
  bool pin_memory = true;
};

// Holds the memory from construction until restore(). In between, moved parameters have no elements.
class MovedStates {
 public:
  // Moves the state, between steps, with nothing on its way. Collective; throws ConfigError on all ranks, and moves
  // nothing, when a host has no room for what its ranks move together.
  MovedStates(const ModelState& state, const MovedParts& parts);
  void restore();
  int64_t bytes() const { return memory_->bytes(); }

 private:
  void hide(const zero::Parameter& parameter);

  std::optional<offload::MovedStorage> memory_;
  std::vector<std::pair<at::Tensor, at::Tensor>> hidden_;  // a parameter, and what it shows otherwise
};

}  // namespace ds::engine
