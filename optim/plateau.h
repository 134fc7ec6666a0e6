// torch.optim.lr_scheduler's ReduceLROnPlateau: learning rates by measured values. Torch-free.
#pragma once

#include <cstddef>
#include <vector>

#include "dsengine/lr_schedule.h"

namespace ds::optimizers {

// Not thread safe.
class Plateau {
 public:
  // Throws ConfigError that names the key for a value that has no meaning, or a list without one for each group.
  Plateau(const ReduceLrOnPlateauOptions& options, size_t group_count);

  // A measured value; one that is NaN is not better. `groups` as many as at construction.
  void observe(double value, std::vector<GroupOptions>& groups);

  const PlateauState& state() const { return state_; }
  void load(const PlateauState& state) { state_ = state; }

 private:
  bool is_better(double value) const;
  void lower(std::vector<GroupOptions>& groups) const;

  const ReduceLrOnPlateauOptions options_;
  const PerGroup min_lr_;
  PlateauState state_;
};

}  // namespace ds::optimizers
