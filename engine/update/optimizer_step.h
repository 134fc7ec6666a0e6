// The boundary of an accumulation, the same on every path of an update: finish the reductions, judge the gradients,
// clip, update the slices, publish the parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/background_save.h"
#include "dsengine/data_loader.h"
#include "engine/order/call_order.h"
#include "engine/report/batch_notes.h"
#include "engine/report/reporter.h"
#include "engine/state/model_state.h"
#include "engine/state/model_watch.h"
#include "engine/state/progress.h"
#include "engine/update/accumulation.h"
#include "engine/update/step_agreement.h"
#include "engine/update/update.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// All of it outlives the step.
struct OptimizerStepParts {
  ModelState& state;
  Update& update;
  Accumulation& accumulation;
  CallOrder& order;
  Progress& progress;
  std::optional<optimizers::LossScaler>& loss_scaler;
  const BatchNotes& batches;
  ModelWatch& watch;
  const std::shared_ptr<DataLoader>& loader;  // may be null
  Reporter& reporter;
  checkpoint::BackgroundSave& saving;
  bool judged_by_default = true;  // non_finite_gradients: "auto"
};

// On the engine's thread; collective.
class OptimizerStep {
 public:
  explicit OptimizerStep(const OptimizerStepParts& parts) : parts_(parts) {}

  // One step, whose number is in the progress already: sets whether it was applied, the norm and the peaks of memory
  // there. Throws NonFiniteError, and optimizers::LossScaleError after a step that is over; UsageError for parameters
  // without gradient.
  void run();
  // Before run(), whose gradients are scaled to at most this norm, before the plan's clipping: finishes the reductions.
  // Returns the norm, as run() will report it. Collective.
  double clip(double max_norm);
  // The program has changed the reduced gradient of the step that comes, `times` times.
  void note_gradient_change(uint64_t times = 1) { gradient_changes_ += times; }
  // That, and what it has asked to clip: of an accumulation that is dropped.
  void forget_gradient_changes();

 private:
  // L2 norm of the reduced gradient over the whole model, with loss scale still in it.
  double global_norm() const;
  StepFacts facts();
  void warn_of_nothing(double norm);
  // What ranks of this rank's tensor axis do not agree on. Collective over them.
  std::string problem_of_axis(const StepFacts& facts) const;
  std::string of_engine() const;
  void add_over_ranks(double& squares, comm::Communicator& ranks) const;
  void reduce_tied() const;
  std::vector<int64_t> trained_without_gradient() const;
  void require_gradients();
  std::string judge(double norm);
  void apply(double norm, double loss_scale, double clip_once);
  void note_peaks();

  OptimizerStepParts parts_;
  std::optional<double> clip_once_;  // the program's, for the next step
  uint64_t gradient_changes_ = 0;    // likewise
  int64_t bad_steps_in_a_row_ = 0;
  int64_t zero_steps_in_a_row_ = 0;
  bool warned_of_no_gradient_ = false;
  bool warned_of_zeros_ = false;
};

}  // namespace ds::engine
