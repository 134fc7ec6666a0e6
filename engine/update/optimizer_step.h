// The boundary of an accumulation, the same on every path of an update: finish the reductions, judge the gradients,
// clip, update the slices, publish the parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/background_save.h"
#include "engine/order/call_order.h"
#include "engine/report/batch_notes.h"
#include "engine/report/reporter.h"
#include "engine/state/model_state.h"
#include "engine/state/progress.h"
#include "engine/update/accumulation.h"
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

 private:
  // L2 norm of the reduced gradient over the whole model, with loss scale still in it.
  double global_norm() const;
  void add_over_ranks(double& squares, comm::Communicator& ranks) const;
  void reduce_tied() const;
  void require_gradients();
  std::string judge(double norm);
  void apply(double norm, double loss_scale);
  void note_peaks();

  OptimizerStepParts parts_;
  int64_t bad_steps_in_a_row_ = 0;
};

}  // namespace ds::engine
