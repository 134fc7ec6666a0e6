// Lion (arXiv 2302.06675) on flat slices: the sign of an interpolated momentum. On the CPU by kernels/lion_kernel,
// elsewhere and in float64 by LibTorch's operators.
//
// Where gradient and momentum are both zero the sign is 0, as in the paper (DeepSpeed's CUDA kernel moves such weights
// by +lr).
#pragma once

#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::optimizers {

class Lion final : public CopyingOptimizer {
 public:
  explicit Lion(std::vector<GroupOptions> groups) : CopyingOptimizer(std::move(groups)) {}
  void update_into(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  NamedStates states(int64_t index) override;
  OptimizerTraits traits() const override {
    return {.state_bytes_per_element = 4, .uses_betas = true, .device_kernels = DeviceKernels::kAllTypes};
  }
  std::string name() const override { return "Lion"; }

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  std::vector<at::Tensor> exp_avg_;
};

}  // namespace ds::optimizers
