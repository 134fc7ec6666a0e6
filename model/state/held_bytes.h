// The memory that a rank's part of the model takes, counted from the tensors themselves.
#pragma once

#include <cstdint>

#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "zero/memory_model.h"

namespace ds::engine {

// The bytes on the device now; for gradients, their peak in the last step.
struct HeldBytes {
  zero::ModelStateBytes state;
  int64_t average = 0;    // of the weights (.ema)
  int64_t gathered = 0;   // stage 3: whole for operators at once, at most in the last step
  int64_t secondary = 0;  // zero_hpz_partition_size: slices for the ranks of a node
};

HeldBytes held_bytes(const ModelState& state, const Progress& progress);

int64_t frozen_bytes(const ModelState& state);
// States of the optimizer that are on the device.
int64_t device_state_bytes(const ModelState& state);

}  // namespace ds::engine
