#include "engine/update/optimizer_step.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/check_time.h"
#include "core/log.h"
#include "engine/update/axis_agreement.h"
#include "model/state/finished_gradients.h"
#include "model/state/shared_buffers.h"
#include "optim/clip.h"

namespace ds::engine {
namespace {

// Odd, with bits everywhere: numbers that differ do so in their low bits, too.
constexpr uint64_t kMixing = 0x9E3779B97F4A7C15;

}  // namespace

void OptimizerStep::run() {
  const at::NoGradGuard no_grad;
  const Plan& plan = parts_.state.plan;
  parts_.saving.wait_copied();
  // What was gathered ahead and is not used reads slices, and holds the memory they are read into.
  parts_.state.access->wait_all();
  parts_.update.settle(Update::Next::kStep);
  judge_late();
  StepAgreement agreement(facts(), *parts_.state.ranks.part, parts_.state.ranks.device);
  finish_gradients(parts_.state);
  parts_.reporter.reductions_end();
  if (parts_.state.ranks.device.is_cpu()) {
    agree(agreement, /*updated=*/false);
  } else {  // on all ranks alike, whatever each of them does with the norm
    note_late(std::move(agreement));
  }
  if (plan.require_all_gradients) require_gradients();  // which all ranks wait for
  if (judges_late()) return run_late();
  const double scale = parts_.accumulation.loss_scale();
  const std::optional<double> clip_once = std::exchange(clip_once_, std::nullopt);
  const bool has_norm = plan.compute_grad_norm || clip_once;
  const double norm = has_norm ? global_norm(parts_.state) / scale : 0.0;
  const bool overflow = !std::isfinite(norm);
  const bool drops = overflow && plan.non_finite != config::NonFiniteGradients::kContinue;
  parts_.progress.gradient_norm.reset();
  if (has_norm) parts_.progress.gradient_norm = drops ? std::numeric_limits<double>::infinity() : norm;
  if (drops) parts_.update.settle(Update::Next::kDrop);
  const std::string report = judge(norm);
  warn_of_zeros(norm, warn_of_no_gradient(), parts_.progress.global_steps);
  if (!drops) apply(norm, scale, clip_once.value_or(0));
  if (parts_.state.fp8) end_fp8_step(/*applied=*/!drops);
  step_over();
  require<NonFiniteError>(!drops || plan.non_finite != config::NonFiniteGradients::kError, report);
  if (parts_.loss_scaler) parts_.loss_scaler->update(overflow);  // last: throws when the scale cannot fall any further
  if (parts_.loss_scaler && parts_.state.fp8) parts_.state.fp8->gradients_scaled(parts_.loss_scaler->scale() / scale);
}

// The largest of gradients that overflow, and of what gave them, say nothing of the steps that come.
void OptimizerStep::end_fp8_step(bool applied, const at::Tensor& skip) {
  if (applied) {
    parts_.state.fp8->end_step(*parts_.state.ranks.part, skip);
  } else {
    parts_.state.fp8->drop_step();
  }
}

void OptimizerStep::step_over() {
  note_peaks();
  parts_.accumulation.drop();
  parts_.state.choose_gradients();
  parts_.update.step_over();
}

void OptimizerStep::agree(StepAgreement& agreement, bool updated) {
  bool parted = false;
  try {
    parts_.progress.loss = agreement.finish(parted, updated);
    if (agreement.buffers_differ()) warn_of_buffers();
  } catch (...) {
    if (parted) parts_.order.slice_updated();  // what each rank has is no longer one model
    throw;
  }
}

void OptimizerStep::forget_gradient_changes() {
  clip_once_.reset();
  gradient_changes_ = 0;
}

StepFacts OptimizerStep::facts() {
  const CheckTime::Scope time;
  StepFacts facts;
  facts.loss = parts_.batches.loss_of_step();
  if (facts.loss.defined()) facts.loss = facts.loss.to(parts_.state.ranks.device);
  facts.step = parts_.progress.global_steps;
  if (parts_.loader) facts.delivered = parts_.loader->delivered();
  if (parts_.sampler) facts.position = digest_of(parts_.sampler->state());
  facts.gradient_changes = std::exchange(gradient_changes_, 0) * kMixing;
  if (clip_once_) facts.gradient_changes += std::bit_cast<uint64_t>(*clip_once_) + 1;
  const ModelWatch::Digests changes = parts_.watch.take_digests();
  facts.changes = changes.all;
  facts.last_changed = parts_.watch.take_name();
  for (const Axis& axis : parts_.state.axes->list) {
    if (axis.same_data != nullptr) agree_along_axis(facts, *axis.same_data, changes.axis);
  }
  if (parts_.state.gatherer) {
    facts.gathers = parts_.state.gatherer->take_gather_digest();
    if (const comm::Communicator* const copies = parts_.state.ranks.groups.replicas.get()) {
      facts.gather_group = copies->rank();
      facts.gather_groups = copies->size();
    }
  }
  if (looks_at_buffers()) facts.buffers = digest_of_buffers(*parts_.state.module);
  return facts;
}

// At steps 1, 2, 4, 8, ...: running statistics part at once, where they do. A digest waits for the device.
bool OptimizerStep::looks_at_buffers() const {
  const ModelState& state = parts_.state;
  const bool one_only = state.ranks.part->size() == 1 || state.ranks.groups.buffers;
  return !warned_of_buffers_ && !one_only && std::has_single_bit(static_cast<uint64_t>(parts_.progress.global_steps));
}

void OptimizerStep::warn_of_buffers() {
  if (std::exchange(warned_of_buffers_, true) || parts_.state.ranks.part->rank() != 0) return;
  log::warning("step ", parts_.progress.global_steps, of_engine(),
               ": the model's buffers differ between data ranks: running statistics of BatchNorm are each rank's own, ",
               "and checkpoints have those of rank 0. \"sync_batchnorm\": true computes them over all ranks, ",
               "\"broadcast_buffers\": true gives all ranks those of rank 0 (said once)");
}

void OptimizerStep::agree_along_axis(StepFacts& facts, TensorParts& parts, uint64_t changes) const {
  facts.axis = std::make_shared<const AxisAgreement>(AxisFacts{.step = facts.step,
                                                               .delivered = facts.delivered,
                                                               .position = facts.position,
                                                               .loss = facts.loss,
                                                               .data = parts.take_data_digest(),
                                                               .changes = facts.changes,
                                                               .axis_changes = changes,
                                                               .gradient_changes = facts.gradient_changes},
                                                     parts, parts_.state.ranks.device);
}

std::string OptimizerStep::of_engine() const {
  const std::string own = parts_.state.gradients.reducer->engine_if_several();
  return own.empty() ? own : cat(" of ", own);
}

// Training that changes nothing, but for momentum and decay, is a mistake of the program more often than not.
bool OptimizerStep::warn_of_no_gradient() {
  const CheckTime::Scope time;
  const ModelState& state = parts_.state;
  const size_t held = static_cast<size_t>(std::count(state.held_still.begin(), state.held_still.end(), 1));
  const bool none = trained_without_gradient().size() + held == state.parameters.size();
  if (none && !std::exchange(warned_of_no_gradient_, true)) {
    log::warning("step ", parts_.progress.global_steps, of_engine(),
                 ": no parameter of the model got a gradient on this rank: is the ",
                 "loss computed from another model, or from a copy of it? (said once)");
  }
  return none;
}

void OptimizerStep::warn_of_zeros(double norm, bool none, int64_t step) {
  const ModelState& state = parts_.state;
  if (!state.plan.compute_grad_norm) return;
  zero_steps_in_a_row_ = norm == 0.0 ? zero_steps_in_a_row_ + 1 : 0;
  if (none || zero_steps_in_a_row_ < 2 || state.ranks.world->rank() != 0 || std::exchange(warned_of_zeros_, true))
    return;
  log::warning(
      "step ", step, of_engine(), ": all gradients are zero, for the second time in a row: the model ",
      "learns nothing (is the loss constant, or multiplied by zero?). Momentum and weight decay go on (said once)");
}

double OptimizerStep::clip(double max_norm) {
  const at::NoGradGuard no_grad;
  parts_.update.settle(Update::Next::kRead);
  finish_gradients(parts_.state);
  clip_once_ = std::min(max_norm, clip_once_.value_or(max_norm));
  return global_norm(parts_.state) / parts_.accumulation.loss_scale();
}

// `clip_once`: the program's, 0 for none.
void OptimizerStep::apply(double norm, double loss_scale, double clip_once) {
  const double factor = optimizers::clip_factor(norm, {clip_once, parts_.state.plan.clip_norm});
  parts_.update.apply(factor / loss_scale);
  if (late_) late_->updated = true;
  note_update();
}

void OptimizerStep::note_update() {
  parts_.watch.updated();
  parts_.order.update_done();
  parts_.progress.step_applied = true;
}

void OptimizerStep::note_peaks() {
  const ModelState& state = parts_.state;
  parts_.progress.gradient_bytes = state.gradients.reducer->take_peak_bytes();
  if (!state.gatherer) return;
  const int64_t element = state.buckets.front().flat().element_size();
  parts_.progress.gathered_bytes = state.gatherer->take_peak_elements() * element;
}

// Weights that have become NaN make every later step one of these: the first of a row is told, then fewer and fewer.
uint64_t OptimizerStep::count_bad_step(double norm) {
  if (std::isfinite(norm)) {
    bad_steps_in_a_row_ = 0;
    return 0;
  }
  const bool applied = parts_.state.plan.non_finite == config::NonFiniteGradients::kContinue;
  const auto row = static_cast<uint64_t>(++bad_steps_in_a_row_);
  return applied && !std::has_single_bit(row) ? 0 : row;
}

// Of a norm that is not finite: what all ranks then know of it; all but an error is logged.
std::string OptimizerStep::judge(double norm) {
  const uint64_t row = count_bad_step(norm);
  return row == 0 ? std::string()
                  : explain(row, parts_.batches, {.number = parts_.progress.global_steps, .norm = norm});
}

std::string OptimizerStep::explain(uint64_t row, const BatchNotes& batches, NonFiniteStep step) const {
  const ModelState& state = parts_.state;
  step.judged_by_default = parts_.judged_by_default;
  if (parts_.loss_scaler) {
    if (!step.late) step.loss_scale = parts_.loss_scaler->scale();
    step.dynamic_scale = parts_.loss_scaler->dynamic();
  }
  const std::string report = explain_non_finite(state, batches, step);
  if (state.plan.non_finite == config::NonFiniteGradients::kError || state.ranks.world->rank() != 0) return report;
  const bool applied = state.plan.non_finite == config::NonFiniteGradients::kContinue;
  log::warning(report, applied && row > 1 ? cat(" (", row, " steps in a row)") : std::string());
  return report;
}

// Those that the program has frozen since initialize() have none by its own will.
std::vector<int64_t> OptimizerStep::trained_without_gradient() const {
  std::vector<int64_t> missing = parts_.state.gradients.reducer->parameters_without_gradient();
  std::erase_if(missing, [&](int64_t index) { return parts_.state.is_held_still(index); });
  return missing;
}

// zero_optimization.ignore_unused_parameters: false. All ranks throw when one has to.
void OptimizerStep::require_gradients() {
  const ModelState& state = parts_.state;
  const std::vector<int64_t> missing = trained_without_gradient();
  const int64_t largest = largest_of_ranks(static_cast<int64_t>(missing.size()), state.ranks.device, *state.ranks.world,
                                           "unused parameters");
  if (largest == 0) return;
  parts_.accumulation.drop();
  require(!missing.empty(), "step(): ", largest, " trainable parameters got no gradient on another rank, which names ",
          "them, and zero_optimization.ignore_unused_parameters is false");
  std::string names;
  for (const int64_t index : missing) {
    names += cat(names.empty() ? "" : ", ", state.parameters[static_cast<size_t>(index)].name);
  }
  throw UsageError(cat("step(): ", missing.size(), " of ", state.parameters.size(),
                       " trainable parameters got no gradient: ", names,
                       ". Use them in forward, freeze them with set_requires_grad(false), or set ",
                       "zero_optimization.ignore_unused_parameters to true"));
}

}  // namespace ds::engine
