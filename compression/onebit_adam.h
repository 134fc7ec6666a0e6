// 1-bit Adam (Tang et al., arXiv:2102.02888): Adam with decoupled weight decay until `freeze_step`; from then on the
// variance stays as it is, and ranks exchange their momenta as signs with error feedback instead of gradients.
//
//   steps 1 .. freeze_step   AdamW on the mean gradient, bit-equal to it
//   later                    m = compressed(beta1 m + (1 - beta1) g)             g: this rank's own gradient
//                            w = (1 - lr decay) w - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^freeze_step)) + eps)
//
// Elements whose variance is 0 at the freeze have had no gradient; there 1 bit, which has no zero, over eps would be a
// step of any size. They keep their weight (and decay).
//
// As DeepSpeed runs it (`deepspeed_semantics`): no bias correction, the first step changes nothing but the step
// count, and elements without variance are not held: use exp_avg_mask. Their scales are those of a parameter over N
// parts of its own, ours of a parameter within N parts of a bucket, so only the server's scales differ.
//
// Groups with `non_freeze` stay AdamW on mean gradients. Memory beside AdamW's: an error of a whole bucket, and one of
// a part, in float32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compression/compressed_optimizer.h"

namespace ds::compression {

struct OneBitAdamRule {
  int64_t freeze_step = 100000;
  bool bias_correction = true;
  bool deepspeed_semantics = false;
};

class OneBitAdam final : public CompressedOptimizer {
 public:
  OneBitAdam(std::vector<optimizers::GroupOptions> groups, OneBitAdamRule rule, comm::Communicator& communicator);
  optimizers::NamedStates states(int64_t index) override;
  optimizers::OptimizerTraits traits() const override { return {.state_bytes_per_element = 8, .uses_betas = true}; }
  std::string name() const override { return "OneBitAdam"; }

 protected:
  bool is_local(int64_t step) const override { return step > rule_.freeze_step; }
  void advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void allocate_slice_states(int64_t index, const optimizers::NewState& new_state) override;

 private:
  struct State {
    at::Tensor exp_avg, exp_avg_sq;
  };
  void advance_dense(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy);
  void advance_frozen(int64_t index, const at::Tensor& gradient, double gradient_scale);
  bool corrects_bias() const { return rule_.bias_correction && !rule_.deepspeed_semantics; }

  OneBitAdamRule rule_;
  std::vector<State> states_;
};

}  // namespace ds::compression
