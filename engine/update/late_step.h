// A late step: an optimizer step on a GPU that is launched before the host knows its gradient norm.
//
// Note [Steps that are judged late]
// A host that waits for the norm of a step leaves the GPU without work. Where the update's kernels can skip a step by
// themselves, OptimizerStep::run() hands them the norm on the device and does not wait. Until its norm and loss have
// come to the host, the step is late, and the host counts it as applied.
//
//  * LateStep::read() waits for norm and loss. Every function that reports one of them calls it. Where the kernels have
//    skipped the step, it rolls the host's counts back.
//  * The loss scale of the next step depends on whether this one was skipped. The device chooses between the two scales
//    that the scaler can come to, and the host learns with the norm which one it was.
//  * The comparison of ranks (StepAgreement) is read late on every GPU, also where the norm is waited for, so that all
//    ranks issue the same collectives where they differ.
//  * OptimizerStep::judge_late() judges the late step: in the next run(), and before the model is saved. It throws what
//    run() would have thrown, one step later (docs/gpu.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "core/device/readback.h"
#include "dsengine/optimizer.h"
#include "engine/report/batch_notes.h"
#include "engine/report/step_warnings.h"
#include "engine/update/scaled_backward.h"
#include "engine/update/step_agreement.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// The objects that a late step refers to; all of them outlive the LateStep.
struct LateStepDeps {
  ModelState& state;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  ScaledBackward& scaled_backward;
  const std::shared_ptr<LrScheduler>& schedule;  // may be null
  const StepWarnings& warnings;
};

// Holds the late step of an engine, or none. One object per engine, which is neither copied nor moved. Used by the
// engine's thread.
class LateStep {
 public:
  // One late step: its number, and the facts by which it is judged.
  struct Record {
    int64_t step = 0;             // its number
    int64_t optimizer_steps = 0;  // how many the optimizer had made before it
    StepAgreement agreement;
    std::optional<double> loss_scale;  // the loss scale in its gradients, where there is a scaler
    Readback norm;                     // float64 [1]; not defined: the step has no norm
    BatchNotes batches;
    bool no_gradient = false;         // no parameter got a gradient
    bool updated = false;             // its update is launched
    bool is_bad = false;              // the host has found its norm not finite, and told so
    bool read = false;                // read() has waited for it
    bool told_of_difference = false;  // the log has been told that ranks differ
  };

  explicit LateStep(const LateStepDeps& deps) : deps_(deps) {}

  // Begins a step whose comparison of ranks is read later. Its norm may still be waited for: then end() is not called.
  void begin(StepAgreement agreement, const BatchNotes& batches);
  bool exists() const { return record_.has_value(); }
  // The comparison of ranks of the step that exists.
  const StepAgreement& agreement() const { return record_->agreement; }
  // Whether the host can do without the loss scale that follows this step until it is read. It cannot where the scaler
  // would throw, or where a scale of 1 would show gradients to the program as they are.
  bool loss_scale_may_be_late() const;
  // Notes that the update of the step is launched.
  void note_update() {
    if (record_) record_->updated = true;
  }
  // Sets the sum of the counts of backward_mean() over all ranks, of a step that is not late.
  void note_tokens(double tokens) { tokens_ = tokens; }
  // Returns this sum for the last step that was read; 0 without counts.
  double tokens() const { return tokens_; }
  // Notes that the host has found the norm of the step not finite.
  void note_bad_norm() {
    if (record_) record_->is_bad = true;
  }
  // Ends a step whose norm only the device knows, and chooses the loss scale of the next one. `loss_scale` is the one
  // in the step's gradients. `bad`: bool [1] on the device, whether the norm is not finite; undefined without a norm.
  void end(Readback norm, bool no_gradient, double loss_scale, const at::Tensor& bad);
  // Waits for norm and loss of the late step and gives them to progress and loss scaler; rolls the counts of a skipped
  // step back. Does nothing without a late step. Logs an error where ranks differ, because the step may never be
  // judged; with `judged_next` it does not, because the caller judges or drops the step at once.
  void read(bool judged_next = false);
  // Reads the late step and returns it to be judged; empty without one.
  std::optional<Record> take();
  // Reads the late step and drops it unjudged, because a loaded state takes the place of what it made.
  void forget();
  // Logs, at the end of an engine, what is wrong with a late step that was not judged. Does not wait: what has not
  // come to the host is left out.
  void log_unjudged() noexcept;

 private:
  void scale_next_on_device(const at::Tensor& bad);
  void roll_back();
  void tell_of_difference();  // logs once that ranks differ

  LateStepDeps deps_;
  std::optional<Record> record_;
  double tokens_ = 0;
};

}  // namespace ds::engine
