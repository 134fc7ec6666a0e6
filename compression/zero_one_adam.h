// 0/1 Adam (Lu et al., arXiv:2202.06009): Adam whose variance is updated ever more rarely, whose gradients travel as
// signs with error feedback in between, and whose ranks, once the variance is frozen, step by themselves and meet every
// few steps. ZeroOneSchedule says which step does what.
//
//   variance step   g = mean gradient;              v = beta2 v + (1 - beta2) g^2;   m = beta1 m + (1 - beta1) g; step
//   other step      g = compressed(own gradient);   m as above;   step
//   frozen          g = own gradient;               m as above;   B -= rate m / D;   rates += rate
//     and meeting   c = compressed(B D);            w += c / D;   m = -c / rates;    B = 0;   rates = 0
//
// with step: w = (1 - lr decay) w - rate m / D, rate = lr / (1 - beta1^t), D = sqrt(v / (1 - beta2^n)) + eps after n
// variance steps. Errors are forgotten at the freeze: those before it belong to gradients, those after it to steps.
// Elements with variance 0 are held, as in OneBitAdam.
//
// The master holds w, on which all ranks agree bit by bit; update_into() gives the model w + B, this rank's own.
// (DeepSpeed steps the weights themselves and takes B off again, so rounding drives its ranks apart; it counts decay
// into B, here it goes into w.) So a slice's master must not be the model's memory, and slices are whole buckets:
// every rank needs all of v and B for its own steps.
//
// `deepspeed_semantics`: no bias correction, the first step changes nothing, the freeze is a step later, nothing is
// held.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compression/compressed_optimizer.h"

namespace ds::compression {

struct ZeroOneRule {
  int64_t var_freeze_step = 100000;
  int64_t var_update_scaler = 16;
  int64_t local_step_scaler = 32678;
  int64_t local_step_clipper = 16;
  bool bias_correction = true;
  bool deepspeed_semantics = false;
};

struct ZeroOneStep {
  bool updates_variance = false;  // from a dense mean of gradients
  bool frozen = false;            // the variance; ranks step by themselves
  bool first_frozen = false;
  bool meets = false;            // frozen: ranks exchange what they have stepped
  int64_t variance_updates = 0;  // up to and including this step
};

// The steps at which 0/1 Adam does what (policies T_v and T_u of the paper, with DeepSpeed's keys), a pure function of
// the step:
//
//   until var_freeze_step   the variance is updated, from a dense mean, at steps that `variance_interval` divides; it
//                           doubles after var_update_scaler of them. At other steps gradients are compressed
//   later                   the variance stays; ranks step by themselves and meet at steps that `local_interval`
//                           divides; it doubles after local_step_scaler steps, up to local_step_clipper
//
// Remembers where it is: steps in order, and the one before, cost constant time.
class ZeroOneSchedule {
 public:
  // Throws ConfigError for values out of range.
  explicit ZeroOneSchedule(const ZeroOneRule& rule);
  // Step `step`, from 1.
  ZeroOneStep at(int64_t step);

 private:
  void advance();

  ZeroOneRule rule_;
  int64_t first_frozen_;
  // The actions of step `step_` and of the one before it, and the intervals and counters that hold after it.
  int64_t step_ = 0;
  ZeroOneStep now_;
  ZeroOneStep before_;
  int64_t variance_interval_ = 1;
  int64_t variance_counter_ = 0;
  int64_t local_interval_ = 1;
  int64_t local_counter_ = 0;
};

class ZeroOneAdam final : public CompressedOptimizer {
 public:
  ZeroOneAdam(std::vector<optimizers::GroupOptions> groups, ZeroOneRule rule, comm::Communicator& communicator);
  // exp_avg is this rank's own between meetings.
  optimizers::NamedStates states(int64_t index) override;
  optimizers::NamedStates rank_states() override;
  optimizers::NamedStates shared_states() override;  // rates: float64 [slices]
  void states_changed(bool rank_states) override;
  at::Tensor weights(int64_t index) override;
  optimizers::OptimizerTraits traits() const override { return {.state_bytes_per_element = 12, .uses_betas = true}; }
  std::string name() const override { return "ZeroOneAdam"; }

 protected:
  bool is_local(int64_t step) const override { return !schedule_.at(step).updates_variance; }
  void advance(int64_t index, const at::Tensor& gradient, double gradient_scale, const at::Tensor& copy) override;
  void allocate_slice_states(int64_t index, const optimizers::NewState& new_state) override;

 private:
  struct State {
    at::Tensor exp_avg, exp_avg_sq;
    at::Tensor stepped;  // B
  };
  void advance_together(int64_t index, const at::Tensor& gradient, double gradient_scale, const ZeroOneStep& step);
  void advance_alone(int64_t index, const at::Tensor& gradient, double gradient_scale, const ZeroOneStep& step);
  void meet(int64_t index, double variance_correction);
  bool corrects_bias() const { return rule_.bias_correction && !rule_.deepspeed_semantics; }

  ZeroOneRule rule_;
  mutable ZeroOneSchedule schedule_;  // a cursor on a pure function
  std::vector<State> states_;
  at::Tensor rates_;  // float64 [slices] on the host, since the last meeting
};

}  // namespace ds::compression
