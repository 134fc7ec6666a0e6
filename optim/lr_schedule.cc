#include "dsengine/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "optim/one_cycle.h"
#include "optim/plateau.h"
#include "optim/torch_cycles.h"
#include "optim/torch_lr_schedules.h"

namespace ds::optimizers {

PerGroup broadcast_to_groups(const PerGroup& values, size_t group_count, const char* key) {
  if (values.size() == 1) return PerGroup(group_count, values[0]);
  require<ConfigError>(!values.empty(), "scheduler.params.", key, ": expected a number, or one for each of the ",
                       group_count, " parameter groups, found none");
  require<ConfigError>(values.size() == group_count, "scheduler.params.", key,
                       ": expected a number, or one for each of the ", group_count, " parameter groups, found ",
                       values.size(), " values");
  return values;
}

namespace {

PerGroup base_lrs(const std::vector<GroupOptions>& groups) {
  PerGroup result;
  for (const GroupOptions& group : groups) result.push_back(group.lr);
  return result;
}

// The rising part that the three warm-up schedules share; of two steps at least, as DeepSpeed's.
class Warmup {
 public:
  Warmup(int64_t steps, WarmupType type) : steps_(std::max<int64_t>(2, steps)), type_(type) {
    require<ConfigError>(steps >= 0, "scheduler.params.warmup_num_steps: expected at least 0, found ", steps);
  }
  int64_t steps() const { return steps_; }
  bool covers(int64_t t) const { return t < steps_; }
  // From 0 to 1, for 0 <= t < steps().
  double progress(int64_t t) const {
    if (type_ == WarmupType::kLinear) return static_cast<double>(t) / static_cast<double>(steps_);
    return (1.0 / std::log(static_cast<double>(steps_))) * std::log(static_cast<double>(t + 1));
  }
  void warn_if_longer_than(int64_t total_steps) const {
    if (total_steps < steps_) {
      log::warning("scheduler.params.total_num_steps (", total_steps, ") is less than warmup_num_steps (", steps_, ")");
    }
  }

 private:
  int64_t steps_;
  WarmupType type_;
};

// WarmupLR, and with a total number of steps WarmupDecayLR.
class WarmupLr final : public LrSchedule {
 public:
  WarmupLr(const WarmupLrOptions& options, std::optional<int64_t> total_steps, const std::vector<GroupOptions>& groups)
      : warmup_(options.warmup_num_steps, options.warmup_type),
        total_steps_(total_steps),
        min_lr_(broadcast_to_groups(options.warmup_min_lr, groups.size(), "warmup_min_lr")),
        max_lr_(broadcast_to_groups(options.warmup_max_lr.value_or(base_lrs(groups)), groups.size(), "warmup_max_lr")) {
    if (total_steps_) warmup_.warn_if_longer_than(*total_steps_);
  }
  std::string name() const override { return total_steps_ ? "WarmupDecayLR" : "WarmupLR"; }
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override {
    const double share = t < 0 ? 0.0 : position(t);
    for (size_t i = 0; i < groups.size(); ++i) groups[i].lr = min_lr_[i] + (max_lr_[i] - min_lr_[i]) * share;
  }

 private:
  double position(int64_t t) const {
    if (warmup_.covers(t)) return warmup_.progress(t);
    if (!total_steps_) return 1.0;
    const double length = std::max(1.0, static_cast<double>(*total_steps_ - warmup_.steps()));
    return std::max(0.0, static_cast<double>(*total_steps_ - t) / length);
  }

  Warmup warmup_;
  std::optional<int64_t> total_steps_;
  PerGroup min_lr_, max_lr_;
};

class WarmupCosineLr final : public LrSchedule {
 public:
  WarmupCosineLr(const WarmupCosineLrOptions& options, const std::vector<GroupOptions>& groups)
      : warmup_(options.warmup_num_steps, options.warmup_type), options_(options), base_lr_(base_lrs(groups)) {
    warmup_.warn_if_longer_than(options.total_num_steps);
  }
  std::string name() const override { return "WarmupCosineLR"; }
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override {
    const double share = t < 0 ? 0.0 : ratio(t);
    for (size_t i = 0; i < groups.size(); ++i) groups[i].lr = base_lr_[i] * share;
  }

 private:
  double ratio(int64_t t) const {
    if (warmup_.covers(t)) {
      return options_.warmup_min_ratio + warmup_.progress(t) * (1.0 - options_.warmup_min_ratio);
    }
    const double length = static_cast<double>(std::max<int64_t>(1, options_.total_num_steps - warmup_.steps()));
    const double progress = std::min(1.0, static_cast<double>(t - warmup_.steps() + 1) / length);
    const double cosine = (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
    return std::max(0.0, options_.cos_min_ratio + (1.0 - options_.cos_min_ratio) * cosine);
  }

  Warmup warmup_;
  WarmupCosineLrOptions options_;
  PerGroup base_lr_;
};

class LrRangeTest final : public LrSchedule {
 public:
  LrRangeTest(const LrRangeTestOptions& options, size_t group_count)
      : options_(options),
        min_lr_(broadcast_to_groups(options.lr_range_test_min_lr, group_count, "lr_range_test_min_lr")) {
    require<ConfigError>(options.lr_range_test_step_size > 0,
                         "scheduler.params.lr_range_test_step_size: expected at least 1, found ",
                         options.lr_range_test_step_size);
  }
  std::string name() const override { return "LRRangeTest"; }
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override {
    double interval = static_cast<double>(t + 1) / static_cast<double>(options_.lr_range_test_step_size);
    if (options_.lr_range_test_staircase) interval = std::floor(interval);
    const double increase = 1 + options_.lr_range_test_step_rate * interval;
    for (size_t i = 0; i < groups.size(); ++i) groups[i].lr = min_lr_[i] * increase;
  }

 private:
  LrRangeTestOptions options_;
  PerGroup min_lr_;
};

// The program's values move it, and no step.
class ReduceLrOnPlateau final : public LrSchedule {
 public:
  ReduceLrOnPlateau(const ReduceLrOnPlateauOptions& options, size_t group_count) {
    const Plateau valid(options, group_count);
  }
  std::string name() const override { return "ReduceLROnPlateau"; }
  void apply(int64_t /*t*/, std::vector<GroupOptions>& /*groups*/) const override {}
};

// Picks the schedule of each kind of options.
struct Maker {
  const std::vector<GroupOptions>& groups;
  bool uses_betas;

  using Result = std::unique_ptr<const LrSchedule>;
  Result operator()(const WarmupLrOptions& o) const { return std::make_unique<WarmupLr>(o, std::nullopt, groups); }
  Result operator()(const WarmupDecayLrOptions& o) const {
    const WarmupLrOptions warmup{.warmup_min_lr = o.warmup_min_lr,
                                 .warmup_max_lr = o.warmup_max_lr,
                                 .warmup_num_steps = o.warmup_num_steps,
                                 .warmup_type = o.warmup_type};
    return std::make_unique<WarmupLr>(warmup, o.total_num_steps, groups);
  }
  Result operator()(const WarmupCosineLrOptions& o) const { return std::make_unique<WarmupCosineLr>(o, groups); }
  Result operator()(const LrRangeTestOptions& o) const { return std::make_unique<LrRangeTest>(o, groups.size()); }
  Result operator()(const OneCycleOptions& o) const { return std::make_unique<OneCycle>(o, groups.size(), uses_betas); }
  Result operator()(const CyclicLrOptions& o) const { return std::make_unique<CyclicLr>(o, groups, uses_betas); }
  Result operator()(const OneCycleLrOptions& o) const { return std::make_unique<OneCycleLr>(o, groups, uses_betas); }
  Result operator()(const ReduceLrOnPlateauOptions& o) const {
    return std::make_unique<ReduceLrOnPlateau>(o, groups.size());
  }
  template <class Options>
  Result operator()(const Options& o) const {
    return std::make_unique<TorchLrSchedule<Options>>(o, groups);
  }
};

}  // namespace

std::unique_ptr<const LrSchedule> make_lr_schedule(const LrScheduleOptions& options,
                                                   const std::vector<GroupOptions>& groups, bool optimizer_uses_betas) {
  return std::visit(Maker{groups, optimizer_uses_betas}, options);
}

}  // namespace ds::optimizers
