// 1-bit LAMB (Li et al., arXiv:2104.06069): LAMB until `freeze_step`, which also averages each parameter's trust
// coefficient; from then on the variance v stays, ranks exchange momenta as signs with error feedback, and the averaged
// coefficient c is scaled by how far a variance that is kept up to date, v', has moved away:
//
//   m' = compressed(beta1 m + (1 - beta1) g)             g: this rank's own gradient
//   v' = beta2 v' + (1 - beta2) ((m' - beta1 m) / (1 - beta1))^2
//   u  = m' / (sqrt(v) + eps);   U = u + decay w;   f = max over the parameter of (sqrt(v) + eps) / (sqrt(v') + eps)
//   with decay:  q = min(1, |u| / |U|), 1 where |U| is 0;  f = f q + 1 - q
//   f clamped to [factor_min, factor_max], then to the last f (1 +- factor_threshold)
//   w -= lr sqrt(1 - beta2^freeze_step) / (1 - beta1^t) c f U
//
// The paper scales momenta to one size before they share one scale; here each parameter has a scale of its own, which
// needs no such factors. Elements whose variance is 0 at the freeze are held, as in OneBitAdam. A parameter whose
// coefficient was never averaged (all were 1) keeps 1.
//
// As DeepSpeed runs it (`deepspeed_semantics`): no bias correction, the first step changes nothing, nothing is held,
// and a coefficient that was never averaged is 0.
//
// Memory beside LAMB's: v' (of a slice), an error of a whole bucket, and one of a part, in float32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compression/compressed_optimizer.h"
#include "optim/lamb_rule.h"

namespace ds::compression {

struct OneBitLambRule {
  optimizers::LambRule lamb;
  int64_t freeze_step = 100000;
  double coeff_beta = 0.9;
  double factor_max = 4.0;
  double factor_min = 0.5;
  double factor_threshold = 0.1;
  bool deepspeed_semantics = false;
};

class OneBitLamb final : public CompressedOptimizer {
 public:
  OneBitLamb(std::vector<optimizers::GroupOptions> groups, OneBitLambRule rule, comm::Communicator& communicator);
  optimizers::NamedStates states(int64_t index) override;
  // "lamb_coefficient/PARAMETER" and "lamb_factor/PARAMETER": float64 [1], its c and last f.
  optimizers::NamedStates shared_states() override;
  optimizers::OptimizerTraits traits() const override { return {.state_bytes_per_element = 12, .uses_betas = true}; }
  std::string name() const override { return "OneBitLamb"; }

 protected:
  bool is_local(int64_t step) const override { return step > rule_.freeze_step; }
  void advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void allocate_slice_states(int64_t index, const optimizers::NewState& new_state) override;

 private:
  struct State {
    optimizers::LambState lamb;
    at::Tensor fresh_variance;  // v'
    at::Tensor parameters;      // int64 [parameters of the bucket]
  };
  void advance_dense(int64_t index, const at::Tensor& gradient, double gradient_scale);
  void advance_frozen(int64_t index, const at::Tensor& gradient, double gradient_scale);
  // f of the bucket's parameters, before it is clamped. Collective where the slice is a part. `previous`: m
  at::Tensor factors(int64_t index, const at::Tensor& previous);
  // The factors clamped; they are remembered as the last ones.
  at::Tensor limited(const State& state, const at::Tensor& factors);

  OneBitLambRule rule_;
  std::vector<State> states_;
  // For each parameter of the model: its c and its last f, float64, and its name.
  at::Tensor coefficient_;
  at::Tensor factor_;
  std::vector<std::string> names_;
};

}  // namespace ds::compression
