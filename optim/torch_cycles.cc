#include "optim/torch_cycles.h"

#include <cmath>
#include <numbers>

#include "core/check.h"
#include "optim/one_cycle.h"

namespace ds::optimizers {
namespace {

constexpr const char* kWhere = "scheduler.params.";

int64_t total_steps_of(const OneCycleLrOptions& options) {
  const auto given = [](const std::optional<int64_t>& steps) { return steps && *steps > 0; };
  if (options.total_steps) {
    require<ConfigError>(given(options.total_steps), kWhere, "total_steps: expected at least 1, found ",
                         *options.total_steps);
    return *options.total_steps;
  }
  require<ConfigError>(given(options.epochs) && given(options.steps_per_epoch), kWhere,
                       "total_steps: expected it, or epochs and steps_per_epoch, each at least 1");
  return *options.epochs * *options.steps_per_epoch;
}

}  // namespace

CycledMomentum::CycledMomentum(bool wanted, const std::vector<GroupOptions>& groups, bool optimizer_uses_betas)
    : wanted_(wanted), uses_betas_(optimizer_uses_betas) {
  if (!wanted_ || uses_betas_) return;
  for (const GroupOptions& group : groups) {
    require<ConfigError>(group.momentum > 0, kWhere, "cycle_momentum: expected an optimizer with betas or a momentum ",
                         "above 0, found a parameter group without; give one, or set cycle_momentum to false");
  }
}

CyclicLr::CyclicLr(const CyclicLrOptions& options, const std::vector<GroupOptions>& groups, bool optimizer_uses_betas)
    : up_(static_cast<double>(options.step_size_up)),
      total_(up_ + static_cast<double>(options.step_size_down.value_or(options.step_size_up))),
      mode_(options.mode),
      gamma_(options.gamma),
      momentum_(options.cycle_momentum, groups, optimizer_uses_betas),
      base_lr_(broadcast_to_groups(options.base_lr, groups.size(), "base_lr")),
      max_lr_(broadcast_to_groups(options.max_lr, groups.size(), "max_lr")),
      base_momentum_(broadcast_to_groups(options.base_momentum, groups.size(), "base_momentum")),
      max_momentum_(broadcast_to_groups(options.max_momentum, groups.size(), "max_momentum")) {
  require<ConfigError>(options.step_size_up > 0, kWhere, "step_size_up: expected at least 1, found ",
                       options.step_size_up);
  require<ConfigError>(options.step_size_down.value_or(1) > 0, kWhere, "step_size_down: expected at least 1, found ",
                       options.step_size_down.value_or(1));
}

double CyclicLr::height(double cycle, double steps) const {
  switch (mode_) {
    case CyclicMode::kTriangular:
      return 1;
    case CyclicMode::kTriangular2:
      return std::pow(2.0, 1 - cycle);
    case CyclicMode::kExpRange:
      break;
  }
  return std::pow(gamma_, steps);
}

void CyclicLr::apply(int64_t t, std::vector<GroupOptions>& groups) const {
  const auto steps = static_cast<double>(t + 1);  // PyTorch counts from 0
  const double cycle = std::floor(1 + steps / total_);
  const double place = 1 + steps / total_ - cycle;
  const double ratio = up_ / total_;
  const double share = (place <= ratio ? place / ratio : (place - 1) / (ratio - 1)) * height(cycle, steps);
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr = base_lr_[i] + (max_lr_[i] - base_lr_[i]) * share;
    if (momentum_.on()) {
      momentum_.set(groups[i], max_momentum_[i] - (max_momentum_[i] - base_momentum_[i]) * share);
    }
  }
}

OneCycleLr::OneCycleLr(const OneCycleLrOptions& options, const std::vector<GroupOptions>& groups,
                       bool optimizer_uses_betas)
    : total_(total_steps_of(options)),
      cosine_(options.cosine),
      div_factor_(options.div_factor),
      final_div_factor_(options.final_div_factor),
      momentum_(options.cycle_momentum, groups, optimizer_uses_betas),
      max_lr_(broadcast_to_groups(options.max_lr, groups.size(), "max_lr")),
      base_momentum_(broadcast_to_groups(options.base_momentum, groups.size(), "base_momentum")),
      max_momentum_(broadcast_to_groups(options.max_momentum, groups.size(), "max_momentum")),
      phases_(phases_of(options, static_cast<double>(total_))) {
  require<ConfigError>(options.pct_start >= 0 && options.pct_start <= 1, kWhere, "pct_start: expected 0 to 1, found ",
                       options.pct_start);
  require<ConfigError>(options.div_factor > 0, kWhere, "div_factor: expected above 0, found ", options.div_factor);
  require<ConfigError>(options.final_div_factor > 0, kWhere, "final_div_factor: expected above 0, found ",
                       options.final_div_factor);
  double begin = 0;
  for (const Phase& phase : phases_) {
    require<ConfigError>(phase.end != begin, kWhere, "total_steps: expected more steps, found ", total_,
                         ", of which a part of the cycle has none (pct_start ", options.pct_start, ")");
    begin = phase.end;
  }
}

std::vector<OneCycleLr::Phase> OneCycleLr::phases_of(const OneCycleLrOptions& options, double total) {
  enum { kFirst, kHighest, kLast };
  const double top = options.pct_start * total - 1;
  if (!options.three_phase) return {{top, kFirst, kHighest}, {total - 1, kHighest, kLast}};
  return {{top, kFirst, kHighest}, {2 * options.pct_start * total - 2, kHighest, kFirst}, {total - 1, kFirst, kLast}};
}

double OneCycleLr::between(double from, double to, double share) const {
  if (!cosine_) return from + (to - from) * share;
  return to + (from - to) / 2 * (std::cos(std::numbers::pi * share) + 1);
}

std::array<double, 3> OneCycleLr::rates(size_t group) const {
  const double first = max_lr_[group] / div_factor_;
  return {first, max_lr_[group], first / final_div_factor_};
}

std::array<double, 3> OneCycleLr::momenta(size_t group) const {
  return {max_momentum_[group], base_momentum_[group], max_momentum_[group]};
}

void OneCycleLr::apply(int64_t t, std::vector<GroupOptions>& groups) const {
  const int64_t steps = t + 1;  // PyTorch counts from 0
  require<ConfigError>(steps <= total_, kWhere, "total_steps: step ", steps, " is asked of a schedule of ", total_,
                       " steps; give as many as are trained");
  double begin = 0;
  size_t index = 0;
  while (index + 1 < phases_.size() && static_cast<double>(steps) > phases_[index].end) begin = phases_[index++].end;
  const Phase& phase = phases_[index];
  const double share = (static_cast<double>(steps) - begin) / (phase.end - begin);
  const auto from = static_cast<size_t>(phase.from);
  const auto to = static_cast<size_t>(phase.to);
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].lr = between(rates(i)[from], rates(i)[to], share);
    if (momentum_.on()) momentum_.set(groups[i], between(momenta(i)[from], momenta(i)[to], share));
  }
}

}  // namespace ds::optimizers
