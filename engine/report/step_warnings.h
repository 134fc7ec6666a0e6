// Tells the log what is wrong with the gradients of steps: there are none, all are zero, one is not finite, or buffers
// differ between ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/report/batch_notes.h"
#include "engine/report/non_finite.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "optim/loss_scaler.h"

namespace ds::engine {

// One per engine, used by the engine's thread. The arguments of the constructor outlive it.
class StepWarnings {
 public:
  // `judged_by_default`: the config leaves non_finite_gradients "auto".
  StepWarnings(const ModelState& state, const Progress& progress,
               const std::optional<optimizers::LossScaler>& loss_scaler, bool judged_by_default)
      : state_(state), progress_(progress), loss_scaler_(loss_scaler), judged_by_default_(judged_by_default) {}

  // " of engine ..." for a message about a step, where the process has several engines; else empty.
  std::string of_engine() const;
  // Returns whether no parameter has a gradient on this rank, and warns once where none has.
  bool check_gradients();
  // Warns once where the norm is zero for the second time in a row. `no_gradient`: what check_gradients() has returned
  // for this step.
  void check_zeros(double norm, bool no_gradient, int64_t step);
  // Warns of a loss of this rank that is not finite in a step that is applied all the same, because its gradients are
  // finite or nobody has looked: in the first such step, and then in the 2nd, 4th, 8th, ... `loss`: that of the global
  // batch; nothing: it is not known.
  void check_loss(std::optional<double> loss, const BatchNotes& batches, int64_t step);
  // Whether the buffers of ranks are to be compared in this step: at steps 1, 2, 4, 8, ..., for running statistics
  // differ from the first step on where they do, and a digest waits for the device.
  bool looks_at_buffers() const;
  // Warns once that buffers differ, and names them. Collective over the data-parallel ranks, which all know it.
  void warn_of_buffers();
  // Explains a norm that is not finite by what all ranks know of it. All but an error is logged; of many such steps in
  // a row that are applied, fewer and fewer are explained. Returns the explanation, which is empty where the norm is
  // finite or not explained. `batches`: of the step. Collective.
  std::string judge(const BatchNotes& batches, NonFiniteStep step);

 private:
  // Returns how many steps in a row had a norm that is not finite; 0 when this one is finite, or is not to be explained
  // again.
  uint64_t count_bad_step(double norm);

  const ModelState& state_;
  const Progress& progress_;
  const std::optional<optimizers::LossScaler>& loss_scaler_;
  bool judged_by_default_;
  int64_t bad_steps_in_a_row_ = 0;
  int64_t zero_steps_in_a_row_ = 0;
  uint64_t bad_losses_ = 0;  // steps that were applied with one
  bool warned_of_no_gradient_ = false;
  bool warned_of_zeros_ = false;
  bool warned_of_buffers_ = false;
};

}  // namespace ds::engine
