// The boundary of an accumulation, the same on every path of an update: finish the reductions, judge the gradients,
// clip, update the slices, publish the parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/background_save.h"
#include "config/order/call_order.h"
#include "core/device/readback.h"
#include "data/batch_sampler.h"
#include "dsengine/data_loader.h"
#include "dsengine/optimizer.h"
#include "engine/report/batch_notes.h"
#include "engine/report/non_finite.h"
#include "engine/report/reporter.h"
#include "engine/update/accumulation.h"
#include "engine/update/step_agreement.h"
#include "engine/update/update.h"
#include "model/state/model_state.h"
#include "model/state/model_watch.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// All of it outlives the step.
struct OptimizerStepDeps {
  ModelState& state;
  Update& update;
  Accumulation& accumulation;
  CallOrder& order;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  const BatchNotes& batches;
  ModelWatch& watch;
  const std::shared_ptr<DataLoader>& loader;     // may be null
  const std::shared_ptr<BatchSampler>& sampler;  // of its batches, or of the program's; may be null
  const std::shared_ptr<LrScheduler>& schedule;  // likewise
  Reporter& reporter;
  checkpoint::BackgroundSave& saving;
  bool judged_by_default = true;  // non_finite_gradients: "auto"
  bool may_judge_late = false;    // Update::takes_device_scale() of all ranks of the world
};

// On the engine's thread; collective.
class OptimizerStep {
 public:
  explicit OptimizerStep(const OptimizerStepDeps& parts) : parts_(parts) {}

  // One step, whose number is in the progress already: sets whether it was applied, the norm and the peaks of memory
  // there. Throws NonFiniteError, and optimizers::LossScaleError after a step that is over; UsageError for parameters
  // without gradient.
  void run();
  // Before run(), whose gradients are scaled to at most this norm, before the plan's clipping: finishes the reductions.
  // Returns the norm, as run() will report it. Collective.
  double clip(double max_norm);
  // The program has changed the reduced gradient of the step that comes, `times` times.
  void note_gradient_change(uint64_t times = 1) { gradient_changes_ += times; }
  // Note [Steps that are judged late]
  // A host that waits for the norm of a step leaves the device without work. Where the update's kernels can skip a step
  // by themselves, run() gives them the norm as the device has it and does not wait: the step counts as applied. Norm
  // and loss come to the host meanwhile. Whoever asks for one of them has it by read_late(), which waits, and takes
  // back the counts of a step that was skipped. The loss scale of the next step is what the scaler makes of a good step
  // or of one that was skipped: the device chooses, and the host learns with the norm which it was. What ranks have
  // done is compared late on every device, so that they issue the same collectives where they differ. judge_late()
  // judges all of it, in the next run() and before the model is saved: it throws what run() would have thrown, one step
  // later. Collective.
  void judge_late();
  // Waits for the device; of no effect where nothing is late. What it has seen of ranks that differ is logged, because
  // perhaps nobody judges it any more. `judged_next`: judge_late() comes at once, and throws it, or forget_late().
  void read_late(bool judged_next = false);
  // At the end: logs what nobody has judged, as far as the device has told of it by now.
  void tell_unjudged() noexcept;
  // Drops a late step that nobody judges any more, because another state takes the place of what it made.
  void forget_late();
  // Forgets the changes counted by note_gradient_change() and the norm given to clip(), because their accumulation is
  // dropped. Does not touch a late step.
  void forget_gradient_changes();

 private:
  // A step that is made, and that the device has not told of yet.
  struct Late {
    int64_t step = 0;
    int64_t optimizer_steps = 0;  // before it
    StepAgreement agreement;
    std::optional<double> loss_scale;  // of its gradients, where there is a scaler
    Readback norm;                     // float64 [1]; of nothing: there is none
    BatchNotes batches;
    bool no_gradient = false;
    bool updated = false;  // the update has been made
    bool read = false;
    bool told = false;  // that ranks differ
  };
  // Throws where ranks differ. `updated`: after the update.
  void agree(StepAgreement& agreement, bool updated);
  void note_late(StepAgreement agreement);
  // Whether run_late() makes the step that comes: all ranks of the world, or none, for they wait for each other at
  // other places then.
  bool judges_late() const;
  // Whether nothing of the loss scale after this step needs the host at once: an error, or what programs see.
  bool loss_scale_may_be_late() const;
  // The loss scale after a step of which the device knows whether it is `bad`, bool [1].
  void scale_next_on_device(const at::Tensor& bad);
  void run_late();
  StepFacts facts();
  bool looks_at_buffers() const;
  void warn_of_buffers();
  // What this rank's tensor axis says of the step, instead of what the rank alone does. `changes`: ModelWatch's digest.
  void agree_along_axis(StepFacts& facts, TensorParts& parts, uint64_t changes) const;
  // Whether no parameter had a gradient here.
  bool warn_of_no_gradient();
  void warn_of_zeros(double norm, bool no_gradient, int64_t step);
  std::string of_engine() const;
  std::vector<int64_t> trained_without_gradient() const;
  void require_gradients();
  // Returns how many steps in a row had a norm that is not finite; 0 when this one is finite, or is not to be reported
  // again.
  uint64_t count_bad_step(double norm);
  std::string judge(double norm);
  // `row`: of count_bad_step(). Collective.
  std::string explain(uint64_t row, const BatchNotes& batches, NonFiniteStep step) const;
  void take_back_late_step();
  void tell_of_difference();  // once, where ranks differ
  void apply(double norm, double loss_scale, double clip_once);
  void note_update();
  // Scales of FP8 layers. `skip`: as StepScale's, of a step that only the device has judged.
  void end_fp8_step(bool applied, const at::Tensor& skip = {});
  void step_over();
  void note_peaks();

  OptimizerStepDeps parts_;
  std::optional<Late> late_;
  std::optional<double> clip_once_;  // the program's, for the next step
  uint64_t gradient_changes_ = 0;    // likewise
  int64_t bad_steps_in_a_row_ = 0;
  int64_t zero_steps_in_a_row_ = 0;
  bool warned_of_no_gradient_ = false;
  bool warned_of_zeros_ = false;
  bool warned_of_buffers_ = false;
};

}  // namespace ds::engine
