#include "optim/torch_lr_schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace ds::optimizers {
namespace {

void require_steps(const char* key, int64_t found, int64_t least = 1) {
  require<ConfigError>(found >= least, "scheduler.params.", key, ": expected at least ", least, ", found ", found);
}

double share_of(int64_t steps, int64_t total) {
  return static_cast<double>(std::min(steps, total)) / static_cast<double>(total);
}

// From `base` at 0 to `least` at 1.
double cosine(double base, double least, double position) {
  return least + (base - least) * (1.0 + std::cos(std::numbers::pi * position)) / 2.0;
}

}  // namespace

double learning_rate(const StepLrOptions& options, double base, int64_t steps) {
  const int64_t changes = steps / options.step_size;
  return base * std::pow(options.gamma, static_cast<double>(changes));
}

double learning_rate(const MultiStepLrOptions& options, double base, int64_t steps) {
  const auto passed = std::count_if(options.milestones.begin(), options.milestones.end(),
                                    [steps](int64_t milestone) { return milestone <= steps; });
  return base * std::pow(options.gamma, static_cast<double>(passed));
}

double learning_rate(const ConstantLrOptions& options, double base, int64_t steps) {
  return steps < options.total_iters ? base * options.factor : base;
}

double learning_rate(const LinearLrOptions& options, double base, int64_t steps) {
  const double share = share_of(steps, options.total_iters);
  return base * (options.start_factor + (options.end_factor - options.start_factor) * share);
}

double learning_rate(const ExponentialLrOptions& options, double base, int64_t steps) {
  return base * std::pow(options.gamma, static_cast<double>(steps));
}

double learning_rate(const PolynomialLrOptions& options, double base, int64_t steps) {
  return base * std::pow(1.0 - share_of(steps, options.total_iters), options.power);
}

double learning_rate(const CosineAnnealingLrOptions& options, double base, int64_t steps) {
  return cosine(base, options.eta_min, static_cast<double>(steps) / static_cast<double>(options.t_max));
}

double learning_rate(const CosineAnnealingWarmRestartsOptions& options, double base, int64_t steps) {
  int64_t length = options.t_0;
  if (options.t_mult == 1) {
    steps %= length;
  } else {
    for (; steps >= length; length *= options.t_mult) steps -= length;
  }
  return cosine(base, options.eta_min, static_cast<double>(steps) / static_cast<double>(length));
}

void require_valid(const StepLrOptions& options) { require_steps("step_size", options.step_size); }
void require_valid(const MultiStepLrOptions& options) {
  for (const int64_t milestone : options.milestones) require_steps("milestones", milestone, 0);
}
void require_valid(const ConstantLrOptions& options) {
  require_steps("total_iters", options.total_iters, 0);
  require<ConfigError>(options.factor >= 0 && options.factor <= 1, "scheduler.params.factor: expected 0 to 1, found ",
                       options.factor);
}
void require_valid(const LinearLrOptions& options) {
  require_steps("total_iters", options.total_iters);
  require<ConfigError>(options.start_factor > 0 && options.start_factor <= 1,
                       "scheduler.params.start_factor: expected above 0 and at most 1, found ", options.start_factor);
  require<ConfigError>(options.end_factor >= 0 && options.end_factor <= 1,
                       "scheduler.params.end_factor: expected 0 to 1, found ", options.end_factor);
}
void require_valid(const ExponentialLrOptions& /*options*/) {}
void require_valid(const PolynomialLrOptions& options) { require_steps("total_iters", options.total_iters); }
void require_valid(const CosineAnnealingLrOptions& options) { require_steps("T_max", options.t_max); }
void require_valid(const CosineAnnealingWarmRestartsOptions& options) {
  require_steps("T_0", options.t_0);
  require_steps("T_mult", options.t_mult);
}

}  // namespace ds::optimizers
