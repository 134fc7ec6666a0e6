#include <ATen/core/grad_mode.h>

#include "core/replay/replayed_values.h"
#include "dsengine/efficiency.h"

namespace ds::efficiency {

int64_t LayerRuns::next(int64_t layer, const TrainingState& state) {
  if (step_ != state.optimizer_steps || accumulation_ != state.accumulation) runs_.clear();
  step_ = state.optimizer_steps;
  accumulation_ = state.accumulation;
  int64_t& runs = runs_[layer];
  const bool counts = at::GradMode::is_enabled() || ReplayTape::recording();
  return counts ? runs++ : runs;
}

}  // namespace ds::efficiency
