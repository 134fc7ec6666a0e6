// Passes that add to the gradients of a step. What drives them, and when the step comes, is the caller's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "config/order/call_order.h"
#include "engine/report/batch_notes.h"
#include "engine/update/update.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// All of it outlives the accumulation.
struct AccumulationDeps {
  ModelState& state;
  Update& update;
  const CallOrder& order;
  const Progress& progress;
  const std::optional<optimizers::LossScaler>& loss_scaler;
  BatchNotes& batches;
};

// On the engine's thread.
class Accumulation {
 public:
  explicit Accumulation(const AccumulationDeps& parts) : parts_(parts) {}

  // What backward starts from: over the micro-batches of an update, with loss scale.
  at::Tensor averaged(const at::Tensor& loss) const;
  at::Tensor scaled(const at::Tensor& averaged) const;
  // Of the passes that come. Waits where only the device knows it.
  double loss_scale() const;
  // Whether it is another than 1. Does not wait.
  bool scales_loss() const { return device_scale_.defined() || loss_scale() != 1.0; }
  // Only the device knows the loss scale of the passes that come: float32 [], never 1. `read` has the loss scaler know
  // it, and calls loss_scaler_knows().
  void take_device_scale(at::Tensor scale, std::function<void()> read);
  void loss_scaler_knows() { device_scale_.reset(); }

  // Of the micro-batch that the next pass belongs to, from 0; -1: nobody knows.
  void begin_micro_batch(int64_t micro_batch);
  // Runs `pass`, a backward pass or a part of one that adds to gradients, and begins the reductions that follow from
  // it. `in_pass` as of GradientReducer::begin_backward. After what it throws gradients can only be dropped.
  void run(bool boundary, const std::function<void()>& pass, std::vector<char> in_pass = {});
  // Drops all gradients. `unused`: the program starts the accumulation anew.
  void drop(bool unused = false);

 private:
  AccumulationDeps parts_;
  at::Tensor device_scale_;
  std::function<void()> read_scale_;
};

}  // namespace ds::engine
