// Steps on a device whose host does not wait: what is judged of them, one step later (docs/gpu.md).
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <exception>
#include <limits>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "engine/update/optimizer_step.h"
#include "model/state/finished_gradients.h"
#include "optim/clip.h"

namespace ds::engine {
void OptimizerStep::note_late(StepAgreement agreement) {
  agreement.begin_reading();
  parts_.progress.loss.reset();
  late_.emplace(Late{.step = parts_.progress.global_steps,
                     .optimizer_steps = parts_.state.optimizer.step_count(),
                     .agreement = std::move(agreement),
                     .loss_scale = {},
                     .norm = {},
                     .batches = parts_.batches});
}

bool OptimizerStep::judges_late() const {
  const Plan& plan = parts_.state.plan;
  return late_ && parts_.may_judge_late && plan.non_finite != config::NonFiniteGradients::kError &&
         !plan.locate_non_finite && loss_scale_may_be_late();
}

// The host knows the scale of the step that comes here: the step before is read.
bool OptimizerStep::loss_scale_may_be_late() const {
  if (!parts_.loss_scaler) return true;
  const std::optional<double> good = parts_.loss_scaler->scale_after(false);
  const std::optional<double> bad = parts_.loss_scaler->scale_after(true);
  if (!good || !bad) return false;
  if (*good == *bad && *good == parts_.loss_scaler->scale()) return true;
  // With a scale of 1 programs find gradients as they are (ShownGradients).
  return *good != 1.0 && *bad != 1.0;
}

void OptimizerStep::scale_next_on_device(const at::Tensor& bad) {
  const double good_scale = parts_.loss_scaler->scale_after(false).value();
  const double bad_scale = parts_.loss_scaler->scale_after(true).value();
  const double now = parts_.loss_scaler->scale();
  // They may be one and still another than the scale of this step: both the minimum, of a scale that was below it.
  if (good_scale == bad_scale && good_scale == now) return;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(bad.device());
  const at::Tensor next = at::where(bad.squeeze(), at::full({}, bad_scale, options), at::full({}, good_scale, options));
  if (parts_.state.fp8) parts_.state.fp8->gradients_scaled(next / now);
  parts_.accumulation.take_device_scale(next, [this] { read_late(); });
}

void OptimizerStep::run_late() {
  const Plan& plan = parts_.state.plan;
  const double loss_scale = parts_.accumulation.loss_scale();
  const std::optional<double> clip_once = std::exchange(clip_once_, std::nullopt);
  optimizers::StepScale scale{.factor = 1.0 / loss_scale, .device_factor = {}, .skip = {}};
  at::Tensor norm;
  at::Tensor bad;
  if (plan.compute_grad_norm || clip_once) {
    norm = global_norm_on_device(parts_.state) / loss_scale;
    bad = at::isfinite(norm).logical_not_();
    if (plan.non_finite == config::NonFiniteGradients::kSkip) scale.skip = bad.to(at::kFloat);
    scale.device_factor = optimizers::clip_factor(norm, {clip_once.value_or(0), plan.clip_norm});
  }
  Readback told(norm);
  parts_.progress.gradient_norm.reset();
  late_->no_gradient = warn_of_no_gradient();
  parts_.update.apply_on_device(scale);
  late_->updated = true;
  note_update();
  if (parts_.state.fp8) end_fp8_step(/*applied=*/true, scale.skip);
  step_over();
  late_->norm = std::move(told);
  if (!parts_.loss_scaler) return;
  late_->loss_scale = loss_scale;
  if (bad.defined()) {
    scale_next_on_device(bad);
  } else {
    parts_.loss_scaler->update(/*overflow=*/false);
    if (parts_.state.fp8) parts_.state.fp8->gradients_scaled(parts_.loss_scaler->scale() / loss_scale);
  }
}

void OptimizerStep::read_late(bool judged_next) {
  if (!late_) return;
  if (!judged_next) tell_of_difference();
  if (std::exchange(late_->read, true)) return;
  parts_.progress.loss = late_->agreement.loss();
  if (!late_->norm.defined()) return;
  const auto norm = late_->norm.numbers().item<double>();
  if (parts_.loss_scaler) {
    parts_.loss_scaler->update(!std::isfinite(norm));  // as loss_scale_may_be_late(): throws nothing
    parts_.accumulation.loss_scaler_knows();
  }
  parts_.progress.gradient_norm = norm;
  if (std::isfinite(norm) || parts_.state.plan.non_finite != config::NonFiniteGradients::kSkip) return;
  parts_.progress.gradient_norm = std::numeric_limits<double>::infinity();
  take_back_late_step();
}

// The device has changed nothing.
void OptimizerStep::take_back_late_step() {
  parts_.state.optimizer.go_back_to(late_->optimizer_steps);
  if (parts_.state.fp8) parts_.state.fp8->take_back_step();
  parts_.progress.step_applied = false;
  --parts_.progress.applied_steps;
  if (parts_.schedule) parts_.schedule->load_last_batch_iteration(parts_.schedule->last_batch_iteration() - 1);
}

void OptimizerStep::tell_of_difference() {
  if (late_->told || !late_->agreement.differs()) return;
  late_->told = true;
  log::error("step ", late_->step, of_engine(),
             ": the ranks differ in what they did to the model, to its gradients or ",
             "to the data: what is read now may not be the same on all of them. The next step(), save_checkpoint() or ",
             "save_16bit_model() says in what, and throws");
}

void OptimizerStep::tell_unjudged() noexcept {
  try {
    if (!late_) return;
    if (late_->agreement.arrived()) tell_of_difference();
    if (!late_->norm.defined() || !late_->norm.arrived() || parts_.state.ranks.world->rank() != 0) return;
    const auto norm = late_->norm.numbers().item<double>();
    if (std::isfinite(norm)) return;
    const bool skipped = parts_.state.plan.non_finite == config::NonFiniteGradients::kSkip;
    log::warning("step ", late_->step, of_engine(), ", the last one: the norm of its gradients is ", norm, "; it was ",
                 skipped ? "skipped" : "applied");
  } catch (const std::exception& error) {
    log::error("at the end of an engine: ", error.what());
  }
}

void OptimizerStep::forget_late() {
  read_late(/*judged_next=*/true);
  late_.reset();
}

void OptimizerStep::judge_late() {
  if (!late_) return;
  read_late(/*judged_next=*/true);
  Late late = std::move(*late_);
  late_.reset();
  agree(late.agreement, late.updated);
  if (!late.norm.defined()) return;
  const auto norm = late.norm.numbers().item<double>();
  warn_of_zeros(norm, late.no_gradient, late.step);
  if (const uint64_t row = count_bad_step(norm); row > 0) {
    explain(row, late.batches, {.number = late.step, .norm = norm, .loss_scale = late.loss_scale, .late = true});
  }
}

}  // namespace ds::engine
