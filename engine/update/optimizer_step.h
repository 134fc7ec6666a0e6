// The boundary of an accumulation, the same on every path of an update: finish the reductions, judge the gradients,
// clip, update the slices, publish the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "config/order/call_order.h"
#include "data/batch_sampler.h"
#include "dsengine/data_loader.h"
#include "dsengine/optimizer.h"
#include "engine/report/batch_notes.h"
#include "engine/report/reporter.h"
#include "engine/report/step_warnings.h"
#include "engine/update/accumulation.h"
#include "engine/update/late_step.h"
#include "engine/update/step_agreement.h"
#include "engine/update/update.h"
#include "model/state/model_state.h"
#include "model/state/model_watch.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// The data of the steps, whose place ranks compare.
struct StepData {
  const BatchNotes& batches;                     // of the running accumulation
  const std::shared_ptr<DataLoader>& loader;     // may be null
  const std::shared_ptr<BatchSampler>& sampler;  // of the loader's batches, or of the program's; may be null
};

// What a step works on. All of it outlives the step.
struct OptimizerStepDeps {
  ModelState& state;
  Update& update;
  Accumulation& accumulation;
  ModelConsistency& consistency;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  ModelWatch& watch;
  Reporter& reporter;
  StepData data;
  const std::shared_ptr<LrScheduler>& schedule;  // may be null
  bool judged_by_default = true;                 // the config leaves non_finite_gradients "auto"
  bool may_judge_late = false;                   // Update::takes_device_scale() of all ranks of the world
};

// Is called on the engine's thread; collective. It stays where it was made.
class OptimizerStep {
 public:
  explicit OptimizerStep(const OptimizerStepDeps& deps);

  // Makes one step, whose number is in the progress already: sets whether it was applied, the norm and the peaks of
  // memory there. Throws NonFiniteError, and optimizers::LossScaleError after a step that is over; UsageError for
  // parameters without gradient.
  void run();
  // Has the next run() scale its gradients to at most this norm, before the plan's clipping. Finishes the reductions,
  // and returns the norm that run() will report.
  double clip(double max_norm);
  // The program has changed the reduced gradient of the step that comes, `times` times.
  void note_gradient_change(uint64_t times = 1) { gradient_changes_ += times; }
  // Forgets the changes counted by note_gradient_change() and the norm given to clip(), because their accumulation is
  // dropped. Does not touch a late step.
  void forget_gradient_changes();
  // The last step, where the host has not waited for it.
  LateStep& late() { return late_; }
  // Judges the late step, if there is one; throws what run() would have thrown.
  void judge_late();

 private:
  // Throws where ranks differ. `updated`: the step has been made meanwhile.
  void agree(StepAgreement& agreement, bool updated);
  StepFacts facts();
  // Whether run_late() makes the step that comes: all ranks of the world do, or none, for they wait for each other at
  // other places then.
  bool judges_late() const;
  // Makes the step without waiting for the device; see Note [Steps that are judged late].
  void run_late();
  // Clips and updates. `clip_once`: the norm given to clip(), 0 for none.
  void apply(double norm, double loss_scale, double clip_once);
  void note_update();
  // Ends the step of the scales of FP8 layers. `skip`: the device's word that the step changes nothing, see StepScale.
  void end_fp8_step(bool applied, const at::Tensor& skip = {});
  void end_step();

  OptimizerStepDeps deps_;
  StepWarnings warnings_;
  LateStep late_;
  std::optional<double> clip_once_;  // the norm given to clip(), for the next step
  uint64_t gradient_changes_ = 0;    // those counted by note_gradient_change(), for the next step
};

}  // namespace ds::engine
