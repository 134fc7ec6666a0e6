#include "optim/one_cycle.h"

#include <cmath>

#include "core/check.h"
#include "core/log.h"

namespace ds::optimizers {
namespace {

constexpr double kBeta2 = 0.99;

}  // namespace

OneCycle::OneCycle(const OneCycleOptions& options, size_t group_count, bool optimizer_uses_betas)
    : first_size_(static_cast<double>(options.cycle_first_step_size)),
      second_size_(static_cast<double>(options.cycle_second_step_size.value_or(options.cycle_first_step_size))),
      total_size_(first_size_ + second_size_),
      first_stairs_(options.cycle_first_stair_count),
      second_stairs_(options.cycle_second_stair_count.value_or(options.cycle_first_stair_count)),
      decay_step_size_(static_cast<double>(options.decay_step_size)),
      decay_lr_rate_(options.decay_lr_rate),
      decay_mom_rate_(options.decay_mom_rate),
      cycle_momentum_(options.cycle_momentum && optimizer_uses_betas),
      min_lr_(broadcast_to_groups(options.cycle_min_lr, group_count, "cycle_min_lr")),
      max_lr_(broadcast_to_groups(options.cycle_max_lr, group_count, "cycle_max_lr")),
      min_mom_(broadcast_to_groups(options.cycle_min_mom, group_count, "cycle_min_mom")),
      max_mom_(broadcast_to_groups(options.cycle_max_mom, group_count, "cycle_max_mom")) {
  const char* where = "scheduler.params.";
  require<ConfigError>(first_size_ > 0, where, "cycle_first_step_size: expected at least 1, found ", first_size_);
  require<ConfigError>(second_size_ >= 0, where, "cycle_second_step_size: expected at least 0, found ", second_size_);
  require<ConfigError>(first_stairs_ >= 0, where, "cycle_first_stair_count: expected at least 0, found ",
                       first_stairs_);
  require<ConfigError>(second_stairs_ >= 0, where, "cycle_second_stair_count: expected at least 0, found ",
                       second_stairs_);
  require<ConfigError>(decay_step_size_ >= 0, where, "decay_step_size: expected at least 0, found ", decay_step_size_);
  if (options.cycle_momentum && !optimizer_uses_betas) {
    log::warning("scheduler.params.cycle_momentum is dropped: the optimizer has no betas (set it to false)");
  }
}

void OneCycle::apply(int64_t t, std::vector<GroupOptions>& groups) const {
  const bool in_cycle = static_cast<double>(t) < total_size_;
  const double position = in_cycle && t >= 0 ? cycle_position(t) : 0.0;
  double lr_divisor = 1.0;
  double momentum_factor = 1.0;
  if (!in_cycle && decay_step_size_ > 0) {
    const double interval = (static_cast<double>(t) - total_size_ + 1) / decay_step_size_;
    lr_divisor = 1 + decay_lr_rate_ * interval;
    momentum_factor = 1 + decay_mom_rate_ * interval;
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr = in_cycle ? min_lr_[i] + (max_lr_[i] - min_lr_[i]) * position : min_lr_[i] / lr_divisor;
    if (!cycle_momentum_) continue;
    groups[i].beta2 = kBeta2;
    // At construction DeepSpeed starts from the minimum; from the first step on it comes down from the maximum.
    groups[i].beta1 = t < 0      ? min_mom_[i]
                      : in_cycle ? max_mom_[i] - (max_mom_[i] - min_mom_[i]) * position
                                 : max_mom_[i] * momentum_factor;
  }
}

double OneCycle::cycle_position(int64_t t) const {
  const double iteration = static_cast<double>(t) + 1;
  const double first_share = first_size_ / total_size_;
  const double cycle = std::floor(1 + iteration / total_size_);
  const double x = 1.0 + iteration / total_size_ - cycle;
  const bool rising = x <= first_share;
  const int64_t stairs = rising ? first_stairs_ : second_stairs_;
  if (stairs > 0) return stair_position(iteration, stairs);
  return rising ? x / first_share : (x - 1) / (first_share - 1);
}

double OneCycle::stair_position(double iteration, int64_t stairs) const {
  const double within = std::fmod(iteration, total_size_);
  const auto count = static_cast<double>(stairs);
  const double position =
      within <= first_size_ ? within * count / first_size_ : (total_size_ - within) * count / second_size_;
  return std::floor(position) / count;
}

}  // namespace ds::optimizers
