// Stochastic gradient descent with momentum (torch.optim.SGD) on flat slices, by LibTorch's fused kernel.
#pragma once

#include <string>
#include <vector>

#include "optim/row_update.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

struct SgdRule {
  double dampening = 0.0;
  bool nesterov = false;
};

// Has a state only when a group starts with a momentum; raising it from 0 later throws UsageError.
class Sgd final : public SliceOptimizer, public RowOptimizer {
 public:
  // Throws ConfigError for nesterov without momentum or with dampening, as torch does.
  Sgd(std::vector<GroupOptions> groups, SgdRule rule);
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) override;
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  void update_rows(int64_t index, const TableRows& gradients, double gradient_scale) override;
  NamedStates states(int64_t index) override;
  OptimizerTraits traits() const override {
    return {.state_bytes_per_element = has_momentum_ ? 4 : 0, .device_kernels = DeviceKernels::kAllTypes};
  }
  std::string name() const override { return "SGD"; }

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  const GroupOptions& checked_group(const Slice& slice) const;

  SgdRule rule_;
  bool has_momentum_ = false;
  std::vector<at::Tensor> momentum_;  // undefined without momentum
};

}  // namespace ds::optimizers
