#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

namespace ds::optimizers {

LossScalerOptions torch_rule(double initial_scale, int64_t growth_interval) {
  return {.initial_scale = initial_scale,
          .window = growth_interval,
          .hysteresis = 1,
          .minimum_scale = std::numeric_limits<double>::min(),  // it has none
          .tolerant = true,
          .first_of_window = 0,
          .largest_scale = std::numeric_limits<float>::max()};
}

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  require<ConfigError>(std::isfinite(options.static_scale) && options.static_scale >= 0,
                       "fp16.loss_scale: expected 0 (dynamic) or a positive number, found ", options.static_scale);
  if (dynamic()) {
    require<ConfigError>(std::isfinite(options.initial_scale) && options.initial_scale > 0,
                         "fp16.initial_scale_power: expected a finite positive scale, found ", options.initial_scale);
    require<ConfigError>(options.window > 0, "fp16.loss_scale_window: expected at least 1, found ", options.window);
    require<ConfigError>(options.hysteresis > 0, "fp16.hysteresis: expected at least 1, found ", options.hysteresis);
    require<ConfigError>(std::isfinite(options.minimum_scale) && options.minimum_scale > 0,
                         "fp16.min_loss_scale: expected a positive number, found ", options.minimum_scale);
  }
  state_.scale = dynamic() ? options.initial_scale : options.static_scale;
  state_.remaining_hysteresis = options.hysteresis;
}

LossScaler::Outcome LossScaler::update(bool overflow) {
  Outcome outcome = overflow ? Outcome::kStatic : Outcome::kKept;
  if (dynamic()) outcome = overflow ? on_overflow() : on_good_step();
  ++state_.iteration;
  return outcome;
}

std::optional<double> LossScaler::scale_after(bool overflow) const {
  if (overflow && cannot_fall()) return std::nullopt;
  LossScaler next = *this;
  next.update(overflow);
  return next.scale();
}

bool LossScaler::cannot_fall() const {
  return dynamic() && !options_.tolerant && (options_.hysteresis == 1 || state_.remaining_hysteresis == 1) &&
         state_.scale == options_.minimum_scale;
}

LossScaler::Outcome LossScaler::on_overflow() {
  Outcome outcome = Outcome::kHysteresis;
  if (options_.tolerant) {
    state_.scale = std::max(state_.scale * options_.backoff_factor, options_.minimum_scale);
    outcome = Outcome::kReduced;
  } else if (options_.hysteresis == 1 || state_.remaining_hysteresis == 1) {
    require<LossScaleError>(!cannot_fall(), "the gradients overflow at step ", state_.iteration + 1,
                            " although the loss scale is at its minimum of ", options_.minimum_scale,
                            " and cannot fall further: training has diverged (lower the learning rate, clip gradients, "
                            "or use bf16) or fp16.min_loss_scale is too high");
    state_.scale = std::max(state_.scale * options_.backoff_factor, options_.minimum_scale);
    outcome = Outcome::kReduced;
  } else {
    --state_.remaining_hysteresis;
  }
  state_.last_overflow_iteration = state_.iteration;
  return outcome;
}

LossScaler::Outcome LossScaler::on_good_step() {
  if (options_.consecutive_hysteresis) state_.remaining_hysteresis = options_.hysteresis;
  const int64_t stable = state_.iteration - state_.last_overflow_iteration - options_.first_of_window;
  if (stable <= 0 || stable % options_.window != 0) return Outcome::kKept;
  state_.remaining_hysteresis = options_.hysteresis;
  if (state_.scale * options_.growth_factor > options_.largest_scale) return Outcome::kKept;
  state_.scale *= options_.growth_factor;
  return Outcome::kDoubled;
}

}  // namespace ds::optimizers
