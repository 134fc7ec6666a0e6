// Note [Steps that are judged late]
// A host that waits for the norm of a step leaves the device without work. Where the update's kernels can skip a step
// by themselves, OptimizerStep::run() gives them the norm as the device has it and does not wait: the step counts as
// applied. Norm and loss come to the host meanwhile. Whoever asks for one of them has it by LateStep::read(), which
// waits, and rolls the counts of a step that was skipped back. The loss scale of the next step is what the scaler makes
// of a good step or of one that was skipped: the device chooses, and the host learns with the norm which it was. What
// ranks have done is compared late on every device, so that they issue the same collectives where they differ.
// OptimizerStep::judge_late() judges all of it, in the next run() and before the model is saved: it throws what run()
// would have thrown, one step later (docs/gpu.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "core/device/readback.h"
#include "dsengine/optimizer.h"
#include "engine/report/batch_notes.h"
#include "engine/report/step_warnings.h"
#include "engine/update/accumulation.h"
#include "engine/update/step_agreement.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// What a late step refers to. All of it outlives the step.
struct LateStepDeps {
  ModelState& state;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  Accumulation& accumulation;
  const std::shared_ptr<LrScheduler>& schedule;  // may be null
  const StepWarnings& warnings;
};

// A step that is made, and that the device has not told of yet; or none. Used by the engine's thread; it stays where it
// was made.
class LateStep {
 public:
  struct Record {
    int64_t step = 0;
    int64_t optimizer_steps = 0;  // before the step
    StepAgreement agreement;
    std::optional<double> loss_scale;  // of the step's gradients, where there is a scaler
    Readback norm;                     // float64 [1]; of nothing: there is none
    BatchNotes batches;
    bool no_gradient = false;
    bool updated = false;  // the update has been made
    bool read = false;
    bool told_of_difference = false;
  };

  explicit LateStep(const LateStepDeps& deps) : deps_(deps) {}

  // Begins a step whose agreement is read later, though its update may be made at once.
  void begin(StepAgreement agreement, const BatchNotes& batches);
  bool exists() const { return record_.has_value(); }
  // Whether nothing of the loss scale after this step needs the host at once: an error, or what programs see.
  bool loss_scale_may_be_late() const;
  // The update of the step has been made.
  void note_update() {
    if (record_) record_->updated = true;
  }
  // Ends a step whose norm only the device knows, and chooses the loss scale of the next one. `loss_scale`: of the
  // step's gradients; `bad`: bool [1] on the device, undefined without a norm.
  void end(Readback norm, bool no_gradient, double loss_scale, const at::Tensor& bad);
  // Waits for the device, and has progress, loss scaler and counts know what it tells; without a late step it does
  // nothing. Where ranks differ it logs so, because perhaps nobody judges the step any more. `judged_next`: the caller
  // judges it at once, and throws, or forgets it.
  void read(bool judged_next = false);
  // Reads the step and hands it over, to be judged; empty without one.
  std::optional<Record> take();
  // Reads and drops a step that nobody judges any more, because another state takes the place of what it made.
  void forget();
  // At the end of an engine: logs what nobody has judged, as far as the device has told of it by now.
  void tell_unjudged() noexcept;

 private:
  void scale_next_on_device(const at::Tensor& bad);
  void roll_back();
  void tell_of_difference();  // once

  LateStepDeps deps_;
  std::optional<Record> record_;
};

}  // namespace ds::engine
