// torch.optim.lr_scheduler's schedules that are functions of the number of steps, as learning rates of one parameter
// group. Torch-free, pure.
//
// `steps`: calls of the schedule's step() so far, >= 0. `base`: the group's learning rate when the schedule was made.
// PyTorch computes some of them by multiplying the rate of the step before; these are the closed forms it documents, so
// they agree to rounding, and a resumed run needs no history.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dsengine/lr_schedule.h"

namespace ds::optimizers {

double learning_rate(const StepLrOptions& options, double base, int64_t steps);
double learning_rate(const MultiStepLrOptions& options, double base, int64_t steps);
double learning_rate(const ConstantLrOptions& options, double base, int64_t steps);
double learning_rate(const LinearLrOptions& options, double base, int64_t steps);
double learning_rate(const ExponentialLrOptions& options, double base, int64_t steps);
double learning_rate(const PolynomialLrOptions& options, double base, int64_t steps);
double learning_rate(const CosineAnnealingLrOptions& options, double base, int64_t steps);
double learning_rate(const CosineAnnealingWarmRestartsOptions& options, double base, int64_t steps);

// Throw ConfigError that names the key for a value that has no meaning.
void require_valid(const StepLrOptions& options);
void require_valid(const MultiStepLrOptions& options);
void require_valid(const ConstantLrOptions& options);
void require_valid(const LinearLrOptions& options);
void require_valid(const ExponentialLrOptions& options);
void require_valid(const PolynomialLrOptions& options);
void require_valid(const CosineAnnealingLrOptions& options);
void require_valid(const CosineAnnealingWarmRestartsOptions& options);

// The names are PyTorch's.
inline const char* name_of(const StepLrOptions& /*options*/) { return "StepLR"; }
inline const char* name_of(const MultiStepLrOptions& /*options*/) { return "MultiStepLR"; }
inline const char* name_of(const ConstantLrOptions& /*options*/) { return "ConstantLR"; }
inline const char* name_of(const LinearLrOptions& /*options*/) { return "LinearLR"; }
inline const char* name_of(const ExponentialLrOptions& /*options*/) { return "ExponentialLR"; }
inline const char* name_of(const PolynomialLrOptions& /*options*/) { return "PolynomialLR"; }
inline const char* name_of(const CosineAnnealingLrOptions& /*options*/) { return "CosineAnnealingLR"; }
inline const char* name_of(const CosineAnnealingWarmRestartsOptions& /*options*/) {
  return "CosineAnnealingWarmRestarts";
}

// The schedule of one kind of options.
template <class Options>
class TorchLrSchedule final : public LrSchedule {
 public:
  TorchLrSchedule(Options options, const std::vector<GroupOptions>& groups) : options_(std::move(options)) {
    require_valid(options_);
    for (const GroupOptions& group : groups) base_.push_back(group.lr);
  }
  std::string name() const override { return name_of(options_); }
  // DeepSpeed's schedules count from -1, PyTorch's from 0.
  void apply(int64_t t, std::vector<GroupOptions>& groups) const override {
    for (size_t i = 0; i < groups.size(); ++i) groups[i].lr = learning_rate(options_, base_[i], t + 1);
  }

 private:
  Options options_;
  std::vector<double> base_;
};

}  // namespace ds::optimizers
