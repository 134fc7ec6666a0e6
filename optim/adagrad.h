// Adagrad (torch.optim.Adagrad) on flat slices: on the CPU by kernels/adagrad_kernel, elsewhere and in float64 by
// LibTorch's fused kernel.
#pragma once

#include <string>
#include <vector>

#include "optim/kernels/adagrad_kernel.h"
#include "optim/row_update.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

struct AdagradRule {
  double lr_decay = 0.0;
  double initial_accumulator_value = 0.0;
};

class Adagrad final : public CopyingOptimizer, public RowOptimizer {
 public:
  // Throws ConfigError for negative values.
  Adagrad(std::vector<GroupOptions> groups, AdagradRule rule);
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  void update_rows(int64_t index, const TableRows& gradients, double gradient_scale) override;
  NamedStates states(int64_t index) override;
  OptimizerTraits traits() const override {
    return {.state_bytes_per_element = 4, .device_kernels = DeviceKernels::kAllTypes};
  }
  std::string name() const override { return "Adagrad"; }

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  // The coefficients of the step that runs.
  AdagradCoefficients coefficients_of(const GroupOptions& group) const;

  AdagradRule rule_;
  std::vector<at::Tensor> sum_;
};

}  // namespace ds::optimizers
