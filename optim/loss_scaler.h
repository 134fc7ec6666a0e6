// The loss scale of float16 training, and how it changes. The loss is multiplied by it
// (engine/update/scaled_backward.cc), so that small gradients survive, and the gradients are divided by it before the
// update. Torch-free.
//
// The dynamic rule is DeepSpeed's DynamicLossScaler: an overflow first uses up hysteresis and then halves the scale;
// a good step that follows loss_scale_window good ones doubles it; at the minimum an overflow is an error. At stage 0
// it is that of DeepSpeed's FP16_Optimizer: each overflow halves the scale at once, and at the minimum it stays. One
// difference in use: the engine asks for scale() once per step and unscales with the very value the loss was multiplied
// by, calling update() only afterwards (DeepSpeed updates first, which halves the gradient of the step on which the
// scale doubles).
//
// torch_rule() is that of torch.amp.GradScaler: each overflow shrinks the scale at once, without a minimum, and the
// last of `window` good steps in a row grows it, as long as it stays a finite float32.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

#include "core/check.h"

namespace ds::optimizers {

// The gradients overflow although the loss scale is at its minimum.
class LossScaleError : public Error {
 public:
  using Error::Error;
};

struct LossScalerOptions {
  double static_scale = 0.0;            // fp16.loss_scale: 0 = dynamic
  double initial_scale = 65536.0;       // 2^fp16.initial_scale_power
  int64_t window = 1000;                // fp16.loss_scale_window
  int64_t hysteresis = 2;               // fp16.hysteresis: the overflow of this number halves the scale
  bool consecutive_hysteresis = false;  // refill hysteresis at every good step
  double minimum_scale = 1.0;           // fp16.min_loss_scale
  bool tolerant = false;                // the rule of stage 0: no hysteresis, and no error at the minimum
  double growth_factor = 2.0;           // above 1
  double backoff_factor = 0.5;          // above 0, below 1
  int64_t first_of_window = 1;          // the good step after an overflow that is not counted yet; 0: all are
  double largest_scale = std::numeric_limits<double>::infinity();  // it does not grow beyond
};

// torch.amp.GradScaler's.
LossScalerOptions torch_rule(double initial_scale = 65536.0, int64_t growth_interval = 2000);

// The part of the state that a checkpoint keeps.
struct LossScalerState {
  double scale = 1.0;
  int64_t iteration = 0;
  int64_t last_overflow_iteration = -1;
  int64_t remaining_hysteresis = 1;

  bool operator==(const LossScalerState&) const = default;
};

// Not thread safe. Every rank holds one and feeds it the same overflow flag.
class LossScaler {
 public:
  enum class Outcome {
    kKept,        // a good step, scale unchanged
    kDoubled,     // a good step that completed a window: the scale has grown
    kHysteresis,  // overflow, tolerated: scale unchanged
    kReduced,     // overflow: the scale was halved (shrunk), or set to the minimum
    kStatic,      // overflow with a static scale
  };

  // Throws ConfigError for values out of range.
  explicit LossScaler(const LossScalerOptions& options);

  bool dynamic() const { return options_.static_scale == 0.0; }
  // The factor of the loss of the current step.
  double scale() const { return state_.scale; }
  // Once per optimizer step, after the gradients were judged (and unscaled). Throws LossScaleError, leaving the state
  // as it was, when the scale would have to fall below its minimum, unless it is tolerant.
  Outcome update(bool overflow);
  // scale() after update(overflow); nothing where that throws.
  std::optional<double> scale_after(bool overflow) const;

  // A dynamic scale becomes this one, which is smaller.
  void lower_to(double scale) { state_.scale = scale; }

  const LossScalerState& state() const { return state_; }
  void load(const LossScalerState& state) { state_ = state; }

 private:
  Outcome on_overflow();
  Outcome on_good_step();
  // Whether an overflow is an error.
  bool cannot_fall() const;

  LossScalerOptions options_;
  LossScalerState state_;
};

}  // namespace ds::optimizers
