// The OneCycle schedule (see lr_schedule.h). Torch-free.
#pragma once

#include "dsengine/lr_schedule.h"

namespace ds::optimizers {

// `values` repeated for each of `group_count` groups when it is one value. Throws ConfigError naming `key` when the
// number of values is neither 1 nor group_count.
PerGroup broadcast_to_groups(const PerGroup& values, size_t group_count, const char* key);

class OneCycle final : public LrSchedule {
 public:
  OneCycle(const OneCycleOptions& options, size_t group_count, bool optimizer_uses_betas);
  std::string name() const override { return "OneCycle"; }
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override;

 private:
  // Position between the minimum (0) and the maximum (1) of the lr in iteration t of the cycle.
  double cycle_position(int64_t t) const;
  double stair_position(double iteration, int64_t stairs) const;

  double first_size_ = 0;
  double second_size_ = 0;
  double total_size_ = 0;
  int64_t first_stairs_ = 0;
  int64_t second_stairs_ = 0;
  double decay_step_size_ = 0;
  double decay_lr_rate_ = 0;
  double decay_mom_rate_ = 0;
  bool cycle_momentum_ = false;
  PerGroup min_lr_, max_lr_, min_mom_, max_mom_;
};

}  // namespace ds::optimizers
