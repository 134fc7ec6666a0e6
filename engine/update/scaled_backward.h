// The backward passes of an accumulation: multiplies the loss by the loss scale and 1/accumulation steps, and runs each
// pass with its reductions. Engine::backward() and train_batch() call it; the step that follows is optimizer_step.h's.
// How the loss scale changes is in optim/loss_scaler.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "config/order/call_order.h"
#include "engine/report/batch_notes.h"
#include "engine/update/token_counts.h"
#include "engine/update/update.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// The objects that an accumulation works on; all of them outlive it.
struct ScaledBackwardDeps {
  ModelState& state;
  Update& update;
  const CallOrder& order;
  const Progress& progress;
  const std::optional<optimizers::LossScaler>& loss_scaler;
  BatchNotes& batches;
};

// Scales losses and runs backward passes. Used by the engine's thread.
class ScaledBackward {
 public:
  explicit ScaledBackward(const ScaledBackwardDeps& parts) : parts_(parts), counts_(parts.state) {}

  // The counts of backward_mean() in the running accumulation.
  TokenCounts& counts() { return counts_; }
  const TokenCounts& counts() const { return counts_; }

  // Returns the loss divided by the number of micro-batches of an update.
  at::Tensor averaged(const at::Tensor& loss) const;
  // Returns the factor of a loss that ranks which share a batch have addends of: reductions take the mean over all
  // data ranks, and over these ranks the gradient is a sum.
  double addend_factor() const;
  // Returns the averaged loss times the loss scale, where backward starts.
  at::Tensor scaled(const at::Tensor& averaged) const;
  // Returns the loss scale of the next passes. Waits where only the device knows it.
  double loss_scale() const;
  // Returns what reduced gradients of the running accumulation are to be divided by: the loss scale, and what
  // TokenCounts says. Collective with backward_mean().
  double gradient_scale() { return loss_scale() * counts_.divisor(); }
  // Whether the loss scale is another than 1. Does not wait.
  bool scales_loss() const { return device_scale_.defined() || loss_scale() != 1.0; }
  // Takes a loss scale for the next passes that only the device knows: float32 [], never 1. `read` gives it to the loss
  // scaler, and calls loss_scaler_knows().
  void take_device_scale(at::Tensor scale, std::function<void()> read);
  // Ends the use of that tensor: the loss scaler has the number.
  void loss_scaler_knows() { device_scale_.reset(); }

  // Notes which micro-batch the next pass belongs to, from 0; -1: not known.
  void begin_micro_batch(int64_t micro_batch);
  // Runs `pass`, a backward pass or a part of one that adds to gradients, and begins the reductions of the buckets that
  // it completes. `in_pass` is handed to GradientReducer::begin_backward(). After an exception the gradients can only
  // be dropped.
  void run(bool boundary, const std::function<void()>& pass, std::vector<char> in_pass = {});
  // Drops all gradients. `unused`: no step has used them, because the program starts the accumulation anew.
  void drop(bool unused = false);

 private:
  ScaledBackwardDeps parts_;
  TokenCounts counts_;
  at::Tensor device_scale_;
  std::function<void()> read_scale_;
};

}  // namespace ds::engine
