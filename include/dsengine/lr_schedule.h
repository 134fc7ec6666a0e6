// Learning-rate schedules with DeepSpeed's names, parameters and formulas (deepspeed/runtime/lr_schedules.py): pure
// functions of the iteration. Torch-free.
//
// t = last_batch_iteration is -1 at construction and grows by one with each applied (not skipped) optimizer step, so
// optimizer step number k = 0, 1, ... runs with the values of t = k - 1.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace ds::optimizers {

// The hyper-parameters of one parameter group. They may change from step to step; an optimizer ignores those that it
// does not know. Learning-rate schedules write lr (OneCycle the betas too, torch's cycles beta1 or momentum).
struct GroupOptions {
  double lr = 1e-3;
  double weight_decay = 0.0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double momentum = 0.0;
  double eps = 1e-8;
  bool non_freeze = false;  // OneBitAdam: this group stays AdamW on mean gradients

  bool operator==(const GroupOptions&) const = default;
};

// One value for all parameter groups, or one for each.
using PerGroup = std::vector<double>;

// The curve of a warm-up: a logarithm or a straight line.
enum class WarmupType { kLog, kLinear };

// WarmupLR: from warmup_min_lr to warmup_max_lr, then constant.
struct WarmupLrOptions {
  PerGroup warmup_min_lr = {0.0};
  std::optional<PerGroup> warmup_max_lr;  // empty: the lr that each group has when the schedule is made
  int64_t warmup_num_steps = 1000;        // here and below: 0 and 1 count as 2
  WarmupType warmup_type = WarmupType::kLog;
};

// WarmupDecayLR: from warmup_min_lr to warmup_max_lr, then linearly back to warmup_min_lr at total_num_steps.
struct WarmupDecayLrOptions {
  int64_t total_num_steps = 0;  // required
  PerGroup warmup_min_lr = {0.0};
  std::optional<PerGroup> warmup_max_lr = PerGroup{0.001};
  int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::kLog;
};

// WarmupCosineLR, a ratio of each group's own lr: from warmup_min_ratio to 1, then along a cosine to cos_min_ratio.
struct WarmupCosineLrOptions {
  int64_t total_num_steps = 0;  // required
  double warmup_min_ratio = 0.0;
  int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 0.0001;
  WarmupType warmup_type = WarmupType::kLog;
};

// LRRangeTest: grows from lr_range_test_min_lr without end (arXiv 1803.09820).
struct LrRangeTestOptions {
  PerGroup lr_range_test_min_lr = {1e-3};
  int64_t lr_range_test_step_size = 2000;  // iterations in which it grows by lr_range_test_step_rate of the first
  double lr_range_test_step_rate = 1.0;
  bool lr_range_test_staircase = false;  // true: grows in steps, at the end of these iterations
};

// OneCycle: one cycle of lr, with beta1 running the other way, then decay (arXiv 1803.09820). With cycle_momentum beta2
// is 0.99.
struct OneCycleOptions {
  PerGroup cycle_min_lr;  // required
  PerGroup cycle_max_lr;  // required
  double decay_lr_rate = 0.0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size;  // empty: cycle_first_step_size
  int64_t cycle_first_stair_count = 0;            // 0: continuous
  std::optional<int64_t> cycle_second_stair_count;
  int64_t decay_step_size = 0;  // 0: no decay
  bool cycle_momentum = true;
  PerGroup cycle_min_mom = {0.8};
  PerGroup cycle_max_mom = {0.9};
  double decay_mom_rate = 0.0;
};

// The schedules of torch.optim.lr_scheduler, under its names. Each optimizer step moves them by one. Rates are
// multiples of the lr that each group has when the schedule is made.
struct StepLrOptions {
  int64_t step_size = 0;  // required
  double gamma = 0.1;     // the factor every step_size steps
};
struct MultiStepLrOptions {
  std::vector<int64_t> milestones;  // required: steps after each of which the rate is multiplied
  double gamma = 0.1;
};
struct ConstantLrOptions {
  double factor = 1.0 / 3;
  int64_t total_iters = 5;  // steps with this factor
};
struct LinearLrOptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1.0;
  int64_t total_iters = 5;  // steps from one to the other
};
struct ExponentialLrOptions {
  double gamma = 0;  // required: the factor at every step
};
struct PolynomialLrOptions {
  int64_t total_iters = 5;  // steps to 0
  double power = 1.0;
};
struct CosineAnnealingLrOptions {
  int64_t t_max = 0;  // "T_max", required: steps from the group's lr to eta_min, and as many back
  double eta_min = 0;
};
struct CosineAnnealingWarmRestartsOptions {
  int64_t t_0 = 0;     // "T_0", required: steps of the first cosine
  int64_t t_mult = 1;  // "T_mult": how many times as long each next cosine is
  double eta_min = 0;
};

// How the peaks of CyclicLR change from one cycle to the next.
enum class CyclicMode { kTriangular, kTriangular2, kExpRange };

// torch's CyclicLR (arXiv 1506.01186): straight lines from base_lr to max_lr and back.
struct CyclicLrOptions {
  PerGroup base_lr, max_lr;               // required
  int64_t step_size_up = 2000;            // steps of the way up
  std::optional<int64_t> step_size_down;  // steps of the way down; empty: step_size_up
  CyclicMode mode = CyclicMode::kTriangular;
  double gamma = 1.0;          // kExpRange: the factor of the peak for each step
  bool cycle_momentum = true;  // moves beta1, or momentum, the other way
  PerGroup base_momentum = {0.8}, max_momentum = {0.9};
};

// torch's OneCycleLR (arXiv 1708.07120): from max_lr / div_factor up to max_lr, and down to the first rate /
// final_div_factor. A step beyond total_steps is an error, as in PyTorch.
struct OneCycleLrOptions {
  PerGroup max_lr;                     // required
  std::optional<int64_t> total_steps;  // give it, or epochs and steps_per_epoch
  std::optional<int64_t> epochs, steps_per_epoch;
  double pct_start = 0.3;      // share of the steps that go up
  bool cosine = true;          // "anneal_strategy": "cos" or "linear"
  bool cycle_momentum = true;  // moves beta1, or momentum, the other way
  PerGroup base_momentum = {0.85}, max_momentum = {0.95};
  double div_factor = 25;
  double final_div_factor = 1e4;
  bool three_phase = false;  // goes down as fast as up, then on to the last rate
};

// torch's ReduceLROnPlateau: moves with values that the program measures, not with steps (LrScheduler::step(value)).
struct ReduceLrOnPlateauOptions {
  bool largest = false;  // "mode": "max", the largest value is the best one; "min"
  double factor = 0.1;   // multiplies the rates after more than `patience` values of which none was the best
  int64_t patience = 10;
  double threshold = 1e-4;  // by which a value must be better than the best one
  bool relative = true;     // "threshold_mode": "rel", a share of the best one; "abs"
  int64_t cooldown = 0;     // values after a change that do not count
  PerGroup min_lr = {0.0};
  double eps = 1e-8;  // a smaller change is not made
};
// The memory of ReduceLROnPlateau about the measured values.
struct PlateauState {
  std::optional<double> best;  // the best value; empty: there was none yet
  int64_t bad_values = 0;      // values in a row that were not the best
  int64_t cooldown = 0;        // values still to be ignored
  int64_t values = 0;          // values in all
};

// The options of one schedule, whose type chooses it.
using LrScheduleOptions =
    std::variant<WarmupLrOptions, WarmupDecayLrOptions, WarmupCosineLrOptions, LrRangeTestOptions, OneCycleOptions,
                 StepLrOptions, MultiStepLrOptions, ConstantLrOptions, LinearLrOptions, ExponentialLrOptions,
                 PolynomialLrOptions, CosineAnnealingLrOptions, CosineAnnealingWarmRestartsOptions, CyclicLrOptions,
                 OneCycleLrOptions, ReduceLrOnPlateauOptions>;

// A schedule: the learning rate of each iteration (ReduceLROnPlateau changes none). Immutable, so safe from any thread.
class LrSchedule {
 public:
  virtual ~LrSchedule() = default;
  // DeepSpeed's or PyTorch's name: "WarmupLR", "StepLR", ...
  virtual std::string name() const = 0;
  // Writes lr (and betas) of iteration t >= -1 into the groups, which are as many as at construction.
  virtual void apply(int64_t t, std::vector<GroupOptions>& groups) const = 0;
};

// Makes a schedule. `groups` are the optimizer's at this moment; their number counts, and their lr where the schedule
// begins from it. OneCycle's cycle_momentum is dropped with a warning when the optimizer does not use betas;
// cycle_momentum of CyclicLR and OneCycleLR needs betas, or a momentum above 0 in all groups. Throws ConfigError naming
// the key for a value out of range or a list that does not have one value for each group.
std::unique_ptr<const LrSchedule> make_lr_schedule(const LrScheduleOptions& options,
                                                   const std::vector<GroupOptions>& groups, bool optimizer_uses_betas);

}  // namespace ds::optimizers
