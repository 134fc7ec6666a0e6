// Adagrad (torch.optim.Adagrad) on flat slices: on the CPU by kernels/adagrad_kernel, elsewhere and in float64 by
// LibTorch's fused kernel.
#pragma once

#include <string>
#include <vector>

#include "optim/kernels/adagrad_kernel.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

struct AdagradRule {
  double lr_decay = 0.0;
  double initial_accumulator_value = 0.0;
};

class Adagrad final : public CopyingOptimizer {
 public:
  // Throws ConfigError for negative values.
  Adagrad(std::vector<GroupOptions> groups, AdagradRule rule);
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  bool takes_device_scale() const override { return kernels_take_all(); }
  NamedStates states(int64_t index) override;
  int64_t state_bytes_per_element() const override { return 4; }
  std::string name() const override { return "Adagrad"; }

 protected:
  void allocate_states(int64_t index) override;

 private:
  // The coefficients of the step that runs.
  AdagradCoefficients coefficients_of(const GroupOptions& group) const;

  AdagradRule rule_;
  std::vector<at::Tensor> sum_;
};

}  // namespace ds::optimizers
