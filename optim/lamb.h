// LAMB (arXiv 1904.00962) on flat slices, with the arithmetic of DeepSpeed's FusedLamb kernel:
//
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   u = m / (sqrt(v) + eps) + weight_decay w          (eps_inside_sqrt: m / sqrt(v + eps))
//   coefficient = clamp(|w| / |u|, min_coeff, max_coeff), 1 when a norm is 0; norms over whole parameters
//   w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) coefficient u       (bias correction sits in the step size)
//
// The norms are summed in float64 over the ranks that hold the parameter, so the result does not depend on where slices
// cut it (beyond the last digits of float64). Weights that belong to no segment (padding) are left alone.
#pragma once

#include <string>
#include <vector>

#include "optim/lamb_rule.h"
#include "optim/shard_optimizer.h"

namespace ds::optimizers {

class Lamb final : public SliceOptimizer {
 public:
  // Throws ConfigError when min_coeff is above max_coeff or not positive.
  Lamb(std::vector<GroupOptions> groups, LambRule rule);
  // Collective over the slice's exchange.
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) override;
  // On a device two passes over all slices, with sums in an order of their own; between them the slices' exchanges.
  void update_all(const std::vector<SliceUpdate>& slices, const StepScale& scale) override;
  NamedStates states(int64_t index) override;
  OptimizerTraits traits() const override {
    return {.state_bytes_per_element = 8, .uses_betas = true, .device_kernels = DeviceKernels::kFloat32};
  }
  std::string name() const override { return "Lamb"; }

 protected:
  void allocate_states(int64_t index, const NewState& new_state) override;

 private:
  LambRule rule_;
  std::vector<LambState> states_;
};

}  // namespace ds::optimizers
