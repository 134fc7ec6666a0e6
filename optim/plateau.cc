#include "optim/plateau.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "optim/one_cycle.h"

namespace ds::optimizers {

Plateau::Plateau(const ReduceLrOnPlateauOptions& options, size_t group_count)
    : options_(options), min_lr_(broadcast_to_groups(options.min_lr, group_count, "min_lr")) {
  require<ConfigError>(options.factor < 1.0, "scheduler.params.factor: expected a number below 1, found ",
                       options.factor);
}

bool Plateau::is_better(double value) const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double best = state_.best.value_or(options_.largest ? -kInfinity : kInfinity);
  const double threshold = options_.threshold;
  if (options_.largest) return value > (options_.relative ? best * (1 + threshold) : best + threshold);
  return value < (options_.relative ? best * (1 - threshold) : best - threshold);
}

void Plateau::observe(double value, std::vector<GroupOptions>& groups) {
  ++state_.values;
  if (is_better(value)) {
    state_.best = value;
    state_.bad_values = 0;
  } else {
    ++state_.bad_values;
  }
  if (state_.cooldown > 0) {
    --state_.cooldown;
    state_.bad_values = 0;
  }
  if (state_.bad_values <= options_.patience) return;
  lower(groups);
  state_.cooldown = options_.cooldown;
  state_.bad_values = 0;
}

void Plateau::lower(std::vector<GroupOptions>& groups) const {
  for (size_t i = 0; i < groups.size(); ++i) {
    const double lowered = std::max(groups[i].lr * options_.factor, min_lr_[i]);
    if (groups[i].lr - lowered > options_.eps) groups[i].lr = lowered;
  }
}

}  // namespace ds::optimizers
