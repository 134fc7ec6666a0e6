// The step at an accumulation boundary: finish the reductions, decide from the gradient norm whether the step is
// applied (judge it), find the clip factor, and have the weights updated. How they are updated is in update.h, with
// kernels in optim/. On a GPU the update may be launched before the host has read the norm: a late step (late_step.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "config/order/call_order.h"
#include "data/batch_sampler.h"
#include "dsengine/data_loader.h"
#include "dsengine/optimizer.h"
#include "engine/report/batch_notes.h"
#include "engine/report/reporter.h"
#include "engine/report/step_warnings.h"
#include "engine/update/late_step.h"
#include "engine/update/scaled_backward.h"
#include "engine/update/step_agreement.h"
#include "engine/update/step_settings.h"
#include "engine/update/update.h"
#include "model/state/model_state.h"
#include "model/state/model_watch.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// Where the data of the steps come from: ranks compare how far each has read.
struct StepData {
  const BatchNotes& batches;                     // the batches of the running accumulation
  const std::shared_ptr<DataLoader>& loader;     // may be null
  const std::shared_ptr<BatchSampler>& sampler;  // draws the loader's batches, or the program's; may be null
  SharedBatches& shared;
};

// The objects that a step works on; all of them outlive the OptimizerStep.
struct OptimizerStepDeps {
  ModelState& state;
  Update& update;
  ScaledBackward& scaled_backward;
  ModelConsistency& consistency;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  ModelWatch& watch;
  Reporter& reporter;
  StepData data;
  StepSettings& settings;
  const std::shared_ptr<LrScheduler>& schedule;  // may be null
  bool judged_by_default = true;                 // the config leaves non_finite_gradients "auto"
  bool may_judge_late = false;                   // every rank can take a scale that only the device knows
};

// Makes the steps of an engine, one after the other. One object per engine, which is neither copied nor moved. Used by
// the engine's thread; collective.
class OptimizerStep {
 public:
  explicit OptimizerStep(const OptimizerStepDeps& deps);

  // Makes one step. Progress has its number already, and gets whether the step was applied, the norm and the peaks of
  // memory. Throws UsageError before the update: on a CPU where ranks differ, and, with Plan::require_all_gradients,
  // for parameters without a gradient. On a GPU the next judge_late() throws where ranks differ. Throws NonFiniteError
  // and optimizers::LossScaleError once the step is over.
  void run();
  // Finishes the reductions and returns the gradient norm, which run() will report. The next run() clips to `max_norm`
  // first, and then to the config's own limit (Plan::clip_norm).
  double clip(double max_norm);
  // Notes that the program has changed the reduced gradients of the next step, `times` times.
  void note_gradient_change(uint64_t times) { gradient_changes_ += times; }
  // Notes StepFacts::stages and StepFacts::micro_batches of the next step.
  void note_stages(at::Tensor sums, std::shared_ptr<const MicroBatchDigests> micro_batches) {
    stages_ = std::move(sums);
    micro_batches_ = std::move(micro_batches);
  }
  // Forgets the changes counted by note_gradient_change(), gradients that were set and the norm given to clip(),
  // because their accumulation is dropped. Does not touch a late step.
  void forget_gradient_changes();
  // Returns the holder of the late step, which is the last step until it is judged (LateStep::exists()).
  LateStep& late() { return late_; }
  // Waits for the late step, if there is one, and judges it: throws UsageError where ranks differed in it, and logs a
  // norm that is not finite. Collective.
  void judge_late();

 private:
  // Compares the ranks, puts their mean loss into Progress, and throws UsageError where they differ. `updated`: the
  // step has been made meanwhile.
  void agree(StepAgreement& agreement, bool updated);
  // Collects what this rank compares with others, and resets it.
  StepFacts facts();
  // Gives TokenCounts the sum over ranks that the comparison has brought. On a GPU of several ranks it waits for it.
  void take_tokens(const StepAgreement& agreement);
  // Whether run_late() makes the next step. All ranks of the world answer alike, because run() and run_late() wait for
  // other ranks at different places.
  bool judges_late() const;
  // Makes the step without waiting for the device: Note [Steps that are judged late] in late_step.h.
  void run_late();
  // Updates the weights with the clipped gradients. `clip_once`: the norm given to clip(), 0 for none.
  void apply(double norm, double gradient_scale, double clip_once);
  // Notes that the weights of the step are updated.
  void note_update();
  // Ends the step for the scales of FP8 layers. `skip`: StepScale::skip, by which the device says that the step changes
  // nothing.
  void end_fp8_step(bool applied, const at::Tensor& skip = {});
  // Drops the gradients and prepares the next accumulation.
  void end_step();

  OptimizerStepDeps deps_;
  StepWarnings warnings_;
  LateStep late_;
  std::optional<double> clip_once_;  // the norm given to clip(), for the next step
  uint64_t gradient_changes_ = 0;    // those counted by note_gradient_change(), for the next step
  at::Tensor stages_;                // as note_stages() got them, for the next step
  std::shared_ptr<const MicroBatchDigests> micro_batches_;  // likewise
};

}  // namespace ds::engine
