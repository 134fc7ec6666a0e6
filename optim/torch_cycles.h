// torch.optim.lr_scheduler's CyclicLR and OneCycleLR: learning rates and momenta by the number of steps. Torch-free,
// pure.
#pragma once

#include <array>

#include "dsengine/lr_schedule.h"

namespace ds::optimizers {

// The number that cycles beside the learning rate: the groups' beta1 where the optimizer has betas, else their
// momentum.
class CycledMomentum {
 public:
  // Off without `wanted`. Throws ConfigError where the optimizer has neither: momentum 0 in a group.
  CycledMomentum(bool wanted, const std::vector<GroupOptions>& groups, bool optimizer_uses_betas);
  bool on() const { return wanted_; }
  void set(GroupOptions& group, double value) const { (uses_betas_ ? group.beta1 : group.momentum) = value; }

 private:
  bool wanted_;
  bool uses_betas_;
};

class CyclicLr final : public LrSchedule {
 public:
  CyclicLr(const CyclicLrOptions& options, const std::vector<GroupOptions>& groups, bool optimizer_uses_betas);
  std::string name() const override { return "CyclicLR"; }
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override;

 private:
  double height(double cycle, double steps) const;  // of this cycle, of the first's 1

  double up_ = 0;
  double total_ = 0;
  CyclicMode mode_;
  double gamma_ = 1;
  CycledMomentum momentum_;
  PerGroup base_lr_, max_lr_, base_momentum_, max_momentum_;
};

class OneCycleLr final : public LrSchedule {
 public:
  OneCycleLr(const OneCycleLrOptions& options, const std::vector<GroupOptions>& groups, bool optimizer_uses_betas);
  std::string name() const override { return "OneCycleLR"; }
  // Throws ConfigError for a step beyond the last.
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override;

 private:
  // A way from one of the rates to another, up to step `end`.
  struct Phase {
    double end = 0;
    int from = 0, to = 0;  // places in rates() and momenta()
  };
  static std::vector<Phase> phases_of(const OneCycleLrOptions& options, double total);
  double between(double from, double to, double share) const;
  // First, highest, last.
  std::array<double, 3> rates(size_t group) const;
  std::array<double, 3> momenta(size_t group) const;

  int64_t total_ = 0;
  bool cosine_ = true;
  double div_factor_ = 0;
  double final_div_factor_ = 0;
  CycledMomentum momentum_;
  PerGroup max_lr_, base_momentum_, max_momentum_;
  std::vector<Phase> phases_;
};

}  // namespace ds::optimizers
