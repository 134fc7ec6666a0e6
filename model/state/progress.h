// How far a run has come, and what its last step met.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "model/offloaded/speculative_update.h"

namespace ds::engine {

struct Progress {
  int64_t micro_steps = 0;
  int64_t global_steps = 0;
  int64_t global_samples = 0;
  int64_t applied_steps = 0;
  int64_t skipped_steps() const { return global_steps - applied_steps; }
  // The run in checkpoints (checkpoint::TrainingState::run), on ranks that publish them; empty until the first save.
  std::string run;

  bool step_applied = false;            // whether the last step was applied
  std::optional<double> gradient_norm;  // norm in the last step, without loss scale; infinite where that was dropped
  std::optional<double> loss;           // mean over micro-batches and ranks in the last step, where it is known
  int64_t gradient_bytes = 0;           // peak bytes of gradients in the last step
  int64_t gathered_bytes = 0;           // peak bytes of gathered parameters in the last step
  SpeculationGate speculation;          // super_offload
};

}  // namespace ds::engine
