#include "engine/report/step_warnings.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include "core/check_time.h"
#include "core/log.h"
#include "core/text.h"
#include "model/state/finished_gradients.h"
#include "model/state/shared_buffers.h"

namespace ds::engine {

std::string StepWarnings::of_engine() const {
  const std::string own = state_.gradients.reducer->neighbours().engine_if_several();
  return own.empty() ? own : cat(" of ", own);
}

// Training that changes nothing, but for momentum and decay, is a mistake of the program more often than not.
bool StepWarnings::check_gradients() {
  const CheckTime::Scope time;
  const size_t held = static_cast<size_t>(std::count(state_.held_still.begin(), state_.held_still.end(), 1));
  const bool none = parameters_without_gradient(state_).size() + held == state_.parameters.size();
  if (none && !std::exchange(warned_of_no_gradient_, true)) {
    log::warning("step ", progress_.global_steps, of_engine(),
                 ": no parameter of the model got a gradient on this rank: is the ",
                 "loss computed from another model, or from a copy of it? (said once)");
  }
  return none;
}

void StepWarnings::check_zeros(double norm, bool no_gradient, int64_t step) {
  if (!state_.plan.compute_grad_norm) return;
  zero_steps_in_a_row_ = norm == 0.0 ? zero_steps_in_a_row_ + 1 : 0;
  if (no_gradient || zero_steps_in_a_row_ < 2 || state_.ranks.world->rank() != 0) return;
  if (std::exchange(warned_of_zeros_, true)) return;
  log::warning(
      "step ", step, of_engine(), ": all gradients are zero, for the second time in a row: the model ",
      "learns nothing (is the loss constant, or multiplied by zero?). Momentum and weight decay go on (said once)");
}

// The mean of ranks is not finite where the loss of any rank is not: the others have nothing to look at.
void StepWarnings::check_loss(std::optional<double> loss, const BatchNotes& batches, int64_t step) {
  if (!loss || std::isfinite(*loss)) return;
  if (!state_.ranks.is_first_of_tensor_axis()) return;  // it has the loss of the axis' first rank
  const std::optional<BatchNotes::BadLoss> bad = batches.first_bad_loss();
  if (!bad || !std::has_single_bit(++bad_losses_)) return;
  const std::string name = batches.name_of(bad->micro_batch);
  log::warning(
      "step ", step, of_engine(), ": rank ", state_.ranks.world->rank(), "'s loss of micro-batch ", bad->micro_batch,
      name.empty() ? "" : cat(" (", name, ")"), " is ", name_of_non_finite(bad->loss),
      bad->others == 0 ? "" : cat(", and ", bad->others, " more of this step"),
      state_.plan.compute_grad_norm ? ", and the gradients are finite" : "", ": the step is applied, and the ",
      "mean loss of all ranks, which monitors get, is not finite. Is it a mean over nothing, as cross_entropy() ",
      "of targets that are all ignore_index, or mse_loss() of an empty selection? Give such a batch the loss 0",
      bad_losses_ > 1 ? cat(" (", bad_losses_, " steps so far)") : "");
}

bool StepWarnings::looks_at_buffers() const {
  const bool one_only = state_.ranks.part->size() == 1 || state_.ranks.groups.buffers;
  return !warned_of_buffers_ && !one_only && std::has_single_bit(static_cast<uint64_t>(progress_.global_steps));
}

void StepWarnings::warn_of_buffers() {
  if (warned_of_buffers_) return;
  comm::Communicator& ranks = *state_.ranks.part;
  const std::vector<std::string> names = buffers_that_differ(*state_.module, ranks, state_.ranks.device);
  warned_of_buffers_ = !names.empty();  // on a GPU they may have become equal since the step
  if (ranks.rank() != 0 || names.empty()) return;
  log::warning("step ", progress_.global_steps, of_engine(),
               ": the model's buffers differ between data ranks: ", advice_on_buffers(names), " (said once)");
}

// Weights that have become NaN make every later step one of these: the first of a row is told, then fewer and fewer.
uint64_t StepWarnings::count_bad_step(double norm) {
  if (std::isfinite(norm)) {
    bad_steps_in_a_row_ = 0;
    return 0;
  }
  const bool applied = state_.plan.non_finite == config::NonFiniteGradients::kContinue;
  const auto row = static_cast<uint64_t>(++bad_steps_in_a_row_);
  return applied && !std::has_single_bit(row) ? 0 : row;
}

std::string StepWarnings::judge(const BatchNotes& batches, NonFiniteStep step) {
  const uint64_t row = count_bad_step(step.norm);
  if (row == 0) return {};
  step.judged_by_default = judged_by_default_;
  if (loss_scaler_) {
    if (!step.late) step.loss_scale = loss_scaler_->scale();
    step.dynamic_scale = loss_scaler_->dynamic();
  }
  const std::string report = explain_non_finite(state_, batches, step);
  if (state_.plan.non_finite == config::NonFiniteGradients::kError || state_.ranks.world->rank() != 0) return report;
  const bool applied = state_.plan.non_finite == config::NonFiniteGradients::kContinue;
  log::warning(report, applied && row > 1 ? cat(" (", row, " steps in a row)") : std::string());
  return report;
}

}  // namespace ds::engine
