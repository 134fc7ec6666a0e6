// LAMB (arXiv 1904.00962) on flat slices, with the arithmetic of DeepSpeed's FusedLamb kernel:
//
//   m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
//   u = m / (sqrt(v) + eps) + weight_decay w          (eps_inside_sqrt: m / sqrt(v + eps))
//   coefficient = clamp(|w| / |u|, min_coeff, max_coeff), 1 when a norm is 0; norms over whole parameters
//   w -= lr sqrt(1 - beta2^t) / (1 - beta1^t) coefficient u       (bias correction sits in the step size)
//
// The norms are summed in float64 over the ranks that hold the parameter, so the result does not depend on where slices
// cut it. Weights that belong to no segment (padding) are left alone.
#pragma once

#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace ds::optim {

struct LambRule {
  bool bias_correction = true;
  bool eps_inside_sqrt = false;
  double max_coeff = 10.0;
  double min_coeff = 0.01;
};

class Lamb final : public ShardOptimizer {
 public:
  // Throws ConfigError when min_coeff is above max_coeff or not positive.
  Lamb(std::vector<GroupOptions> groups, LambRule rule);
  // Collective over the slice's exchange.
  void update(int64_t index, const at::Tensor& gradient, double gradient_scale) override;
  NamedStates states(int64_t index) override;
  int64_t state_bytes_per_element() const override { return 8; }
  std::string name() const override { return "Lamb"; }
  bool uses_betas() const override { return true; }

 protected:
  void allocate_states(int64_t index) override;

 private:
  struct State {
    at::Tensor exp_avg, exp_avg_sq;
    int64_t bucket_parameters = 0;
    std::vector<int64_t> position;  // of each segment's parameter among the bucket's
  };

  // Moves the running means, and returns [2, parameters of the bucket]: sums of squares of w and of u, over all ranks.
  at::Tensor advance(const Slice& slice, const State& state, const GroupOptions& group, const at::Tensor& gradient,
                     double gradient_scale) const;
  // One trust coefficient per parameter of the bucket.
  at::Tensor coefficients(const at::Tensor& squares) const;
  // u of the elements from `begin` on; `master` is the weights of the same elements.
  at::Tensor direction(const State& state, const GroupOptions& group, int64_t begin, const at::Tensor& master) const;

  LambRule rule_;
  std::vector<State> states_;
};

}  // namespace ds::optim
