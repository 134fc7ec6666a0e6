// Stochastic gradient descent with momentum (torch.optim.SGD) on flat slices, by LibTorch's fused kernel.
#pragma once

#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::optimizers {

struct SgdRule {
  double dampening = 0.0;
  bool nesterov = false;
};

// Has a state only when a group starts with a momentum; raising it from 0 later throws UsageError.
class Sgd final : public SliceOptimizer {
 public:
  // Throws ConfigError for nesterov without momentum or with dampening, as torch does.
  Sgd(std::vector<GroupOptions> groups, SgdRule rule);
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) override;
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  bool takes_device_scale() const override { return kernels_take_all(); }
  NamedStates states(int64_t index) override;
  int64_t state_bytes_per_element() const override { return has_momentum_ ? 4 : 0; }
  std::string name() const override { return "SGD"; }

 protected:
  void allocate_states(int64_t index) override;

 private:
  const GroupOptions& checked_group(const Slice& slice) const;

  SgdRule rule_;
  bool has_momentum_ = false;
  std::vector<at::Tensor> momentum_;  // undefined without momentum
};

}  // namespace ds::optimizers
