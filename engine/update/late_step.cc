#include "engine/update/late_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <exception>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"

namespace ds::engine {

void LateStep::begin(StepAgreement agreement, const BatchNotes& batches) {
  agreement.begin_reading();
  deps_.progress.loss.reset();
  record_.emplace(Record{.step = deps_.progress.global_steps,
                         .optimizer_steps = deps_.state.optimizer.step_count(),
                         .agreement = std::move(agreement),
                         .loss_scale = {},
                         .norm = {},
                         .batches = batches});
}

// The host knows the scale of this step, because the step before is read.
bool LateStep::loss_scale_may_be_late() const {
  if (!deps_.loss_scaler) return true;
  const std::optional<double> good = deps_.loss_scaler->scale_after(false);
  const std::optional<double> bad = deps_.loss_scaler->scale_after(true);
  if (!good || !bad) return false;
  if (*good == *bad && *good == deps_.loss_scaler->scale()) return true;
  // With a scale of 1 programs find gradients as they are (ShownGradients).
  return *good != 1.0 && *bad != 1.0;
}

void LateStep::end(Readback norm, bool no_gradient, double loss_scale, const at::Tensor& bad) {
  record_->no_gradient = no_gradient;
  record_->norm = std::move(norm);
  if (!deps_.loss_scaler) return;
  record_->loss_scale = loss_scale;
  if (bad.defined()) {
    scale_next_on_device(bad);
    return;
  }
  deps_.loss_scaler->update(/*overflow=*/false);
  deps_.state.fp8->gradients_scaled(deps_.loss_scaler->scale() / loss_scale);
}

void LateStep::scale_next_on_device(const at::Tensor& bad) {
  const double good_scale = deps_.loss_scaler->scale_after(false).value();
  const double bad_scale = deps_.loss_scaler->scale_after(true).value();
  const double now = deps_.loss_scaler->scale();
  // They may be one and still another than the scale of this step: both the minimum, of a scale that was below it.
  if (good_scale == bad_scale && good_scale == now) return;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(bad.device());
  const at::Tensor next = at::where(bad.squeeze(), at::full({}, bad_scale, options), at::full({}, good_scale, options));
  if (!deps_.state.fp8->layers().empty()) deps_.state.fp8->gradients_scaled(next / now);  // a kernel less
  deps_.scaled_backward.take_device_scale(next, [this] { read(); });
}

void LateStep::read(bool judged_next) {
  if (!record_) return;
  if (!judged_next) tell_of_difference();
  if (std::exchange(record_->read, true)) return;
  deps_.progress.loss = record_->agreement.loss();
  tokens_ = record_->agreement.tokens();
  if (!record_->norm.defined()) return;
  const auto norm = record_->norm.numbers().item<double>();
  if (deps_.loss_scaler) {
    deps_.loss_scaler->update(!std::isfinite(norm));  // throws nothing: loss_scale_may_be_late() has asked
    deps_.scaled_backward.loss_scaler_knows();
  }
  deps_.progress.gradient_norm = norm;
  if (std::isfinite(norm) || deps_.state.plan.non_finite != config::NonFiniteGradients::kSkip) return;
  deps_.progress.gradient_norm = std::numeric_limits<double>::infinity();
  roll_back();
}

// Takes back what the host has counted for a step in which the device has changed nothing.
void LateStep::roll_back() {
  deps_.state.optimizer.go_back_to(record_->optimizer_steps);
  deps_.state.fp8->take_back_step();
  if (deps_.state.average) deps_.state.average->take_back_update();
  deps_.progress.step_applied = false;
  --deps_.progress.applied_steps;
  if (deps_.schedule) deps_.schedule->load_last_batch_iteration(deps_.schedule->last_batch_iteration() - 1);
}

void LateStep::tell_of_difference() {
  if (record_->told_of_difference || !record_->agreement.differs()) return;
  record_->told_of_difference = true;
  log::error("step ", record_->step, deps_.warnings.of_engine(),
             ": the ranks differ in what they did to the model, to its gradients or ",
             "to the data: what is read now may not be the same on all of them. The next step(), save_checkpoint() or ",
             "save_16bit_model() says in what, and throws");
}

std::optional<LateStep::Record> LateStep::take() {
  read(/*judged_next=*/true);
  return std::exchange(record_, std::nullopt);
}

void LateStep::forget() { take(); }

void LateStep::log_unjudged() noexcept {
  try {
    if (!record_) return;
    if (record_->agreement.arrived()) tell_of_difference();
    if (!record_->norm.defined() || !record_->norm.arrived() || deps_.state.ranks.world->rank() != 0) return;
    const auto norm = record_->norm.numbers().item<double>();
    if (std::isfinite(norm)) return;
    const bool skipped = deps_.state.plan.non_finite == config::NonFiniteGradients::kSkip;
    log::warning("step ", record_->step, deps_.warnings.of_engine(), ", the last one: the norm of its gradients is ",
                 norm, "; it was ", skipped ? "skipped" : "applied");
  } catch (const std::exception& error) {
    log::error("at the end of an engine: ", without_stack(error.what()));
  }
}

}  // namespace ds::engine
