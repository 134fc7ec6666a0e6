// How far a run has come, and what its last step met.
#pragma once

#include <cstdint>
#include <optional>

#include "model/offloaded/speculation_gate.h"

namespace ds::engine {

struct Progress {
  int64_t micro_steps = 0;
  int64_t global_steps = 0;
  int64_t global_samples = 0;
  int64_t applied_steps = 0;
  int64_t skipped_steps() const { return global_steps - applied_steps; }

  bool step_applied = false;            // the last one
  std::optional<double> gradient_norm;  // of the last step, without loss scale; infinite where it was dropped
  std::optional<double> loss;           // of the last step, the mean over micro-batches and ranks, where it is known
  int64_t gradient_bytes = 0;           // peak of the last step
  int64_t gathered_bytes = 0;           // likewise
  SpeculationGate speculation;          // super_offload
};

}  // namespace ds::engine
