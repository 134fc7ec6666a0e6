#include "engine/update/optimizer_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "core/check.h"
#include "core/check_time.h"
#include "core/device/readback.h"
#include "model/state/finished_gradients.h"
#include "model/state/global_norm.h"
#include "model/state/row_wise.h"
#include "model/state/shared_buffers.h"
#include "optim/clip.h"

namespace ds::engine {
namespace {

// Odd, with bits everywhere: numbers that differ do so in their low bits, too.
constexpr uint64_t kMixing = 0x9E3779B97F4A7C15;

// Begins the comparison along the tensor axis and hands it to StepAgreement in `facts.axis`. `changes`: ModelWatch's
// digest.
void agree_along_axis(StepFacts& facts, TensorParts& parts, uint64_t changes, c10::Device device) {
  const uint64_t settings = facts.settings->digest(StepSettings::Among::kTensorRanks);
  facts.axis = std::make_shared<const AxisAgreement>(AxisFacts{.step = facts.step,
                                                               .delivered = facts.delivered,
                                                               .position = facts.position,
                                                               .loss = facts.loss,
                                                               .data = parts.take_data_digest(),
                                                               .changes = facts.changes,
                                                               .axis_changes = changes,
                                                               .gradient_changes = facts.gradient_changes,
                                                               .settings = settings},
                                                     parts, device);
}

// zero_optimization.ignore_unused_parameters: false. All ranks throw when one has to.
void require_gradients(const ModelState& state, ScaledBackward& scaled_backward) {
  const std::vector<int64_t> missing = parameters_without_gradient(state);
  const int64_t largest = largest_of_ranks(static_cast<int64_t>(missing.size()), state.ranks.device, *state.ranks.world,
                                           "unused parameters");
  if (largest == 0) return;
  scaled_backward.drop();
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

void note_peaks(const ModelState& state, Progress& progress) {
  progress.gradient_bytes = state.gradients.reducer->take_peak_bytes();
  if (state.buckets.empty()) return;  // a stage of a pipeline without trainable parameters
  progress.gathered_bytes = state.access->take_peak_elements() * state.buckets.front().flat().element_size();
}

}  // namespace

OptimizerStep::OptimizerStep(const OptimizerStepDeps& deps)
    : deps_(deps),
      warnings_(deps.state, deps.progress, deps.loss_scaler, deps.judged_by_default),
      late_({.state = deps.state,
             .progress = deps.progress,
             .loss_scaler = deps.loss_scaler,
             .scaled_backward = deps.scaled_backward,
             .schedule = deps.schedule,
             .warnings = warnings_}) {}

void OptimizerStep::run() {
  const at::NoGradGuard no_grad;
  ModelState& state = deps_.state;
  const Plan& plan = state.plan;
  // Gathers ahead of their use may still read slices, and hold the memory that these are read into.
  state.access->wait_all();
  deps_.update.settle(Update::Next::kStep);
  judge_late();
  StepAgreement agreement(facts(), *state.ranks.part, state.ranks.device);
  finish_gradients(state);
  deps_.reporter.reductions_end();
  if (state.ranks.device.is_cpu()) {
    agree(agreement, /*updated=*/false);
    take_tokens(agreement);
    late_.note_tokens(agreement.tokens());
  } else {  // on all ranks alike, whatever each of them does with the norm
    late_.begin(std::move(agreement), deps_.data.batches);
  }
  if (plan.require_all_gradients) require_gradients(state, deps_.scaled_backward);  // which all ranks wait for
  if (judges_late()) return run_late();
  if (late_.exists()) take_tokens(late_.agreement());
  const double loss_scale = deps_.scaled_backward.loss_scale();
  const double scale = deps_.scaled_backward.gradient_scale();
  const std::optional<double> clip_once = std::exchange(clip_once_, std::nullopt);
  const bool has_norm = plan.compute_grad_norm || clip_once;
  const double norm = has_norm ? global_norm(state) / scale : 0.0;
  const bool overflow = !std::isfinite(norm);
  const bool drops = overflow && plan.non_finite != config::NonFiniteGradients::kContinue;
  deps_.progress.gradient_norm.reset();
  if (has_norm) deps_.progress.gradient_norm = drops ? std::numeric_limits<double>::infinity() : norm;
  if (drops) deps_.update.settle(Update::Next::kDrop);
  const int64_t number = deps_.progress.global_steps;
  const std::string report = warnings_.judge(deps_.data.batches, {.number = number, .norm = norm});
  warnings_.check_zeros(norm, warnings_.check_gradients(), number);
  if (overflow) {
    late_.note_bad_norm();
  } else if (!late_.exists()) {  // else the loss is read one step later
    warnings_.check_loss(deps_.progress.loss, deps_.data.batches, number);
  }
  if (!drops) apply(norm, scale, clip_once.value_or(0));
  end_fp8_step(/*applied=*/!drops);
  end_step();
  require<NonFiniteError>(!drops || plan.non_finite != config::NonFiniteGradients::kError, report);
  if (!deps_.loss_scaler) return;
  deps_.loss_scaler->update(overflow);  // last: throws when the scale cannot fall any further
  state.fp8->gradients_scaled(deps_.loss_scaler->scale() / loss_scale);
}

void OptimizerStep::take_tokens(const StepAgreement& agreement) {
  TokenCounts& counts = deps_.scaled_backward.counts();
  if (counts.wants_total()) counts.take_total(agreement.tokens());
}

bool OptimizerStep::judges_late() const {
  const Plan& plan = deps_.state.plan;
  return late_.exists() && deps_.may_judge_late && plan.non_finite != config::NonFiniteGradients::kError &&
         !plan.locate_non_finite && late_.loss_scale_may_be_late();
}

void OptimizerStep::run_late() {
  const Plan& plan = deps_.state.plan;
  const double loss_scale = deps_.scaled_backward.loss_scale();
  const std::optional<double> clip_once = std::exchange(clip_once_, std::nullopt);
  TokenCounts& counts = deps_.scaled_backward.counts();
  if (deps_.state.ranks.part->size() == 1) take_tokens(late_.agreement());  // which the host has
  at::Tensor divisor;  // of TokenCounts, where only the device knows it
  if (counts.wants_total()) divisor = counts.divisor_on_device(late_.agreement().tokens_on_device());
  const double gradient_scale = divisor.defined() ? loss_scale : deps_.scaled_backward.gradient_scale();
  optimizers::StepScale scale{.factor = 1.0 / gradient_scale, .device_factor = {}, .skip = {}};
  at::Tensor norm;
  at::Tensor bad;
  if (plan.compute_grad_norm || clip_once) {
    norm = global_norm_on_device(deps_.state) / gradient_scale;
    if (divisor.defined()) norm = norm / divisor;
    bad = at::isfinite(norm).logical_not_();
    if (plan.non_finite == config::NonFiniteGradients::kSkip) scale.skip = bad.to(at::kFloat);
    scale.device_factor = optimizers::clip_factor(norm, {clip_once.value_or(0), plan.clip_norm});
  }
  if (divisor.defined()) {
    const at::Tensor factor = divisor.reciprocal().to(at::kFloat);
    scale.device_factor = scale.device_factor.defined() ? scale.device_factor * factor : factor;
  }
  Readback told(norm);
  deps_.progress.gradient_norm.reset();
  const bool no_gradient = warnings_.check_gradients();
  deps_.update.apply_on_device(scale);
  note_update();
  end_fp8_step(/*applied=*/true, scale.skip);
  end_step();
  late_.end(std::move(told), no_gradient, loss_scale, bad);
}

void OptimizerStep::judge_late() {
  std::optional<LateStep::Record> late = late_.take();
  if (!late) return;
  agree(late->agreement, late->updated);
  const double norm = late->norm.defined() ? late->norm.numbers().item<double>() : 0.0;
  if (std::isfinite(norm) && !late->is_bad) warnings_.check_loss(deps_.progress.loss, late->batches, late->step);
  if (!late->norm.defined()) return;
  warnings_.check_zeros(norm, late->no_gradient, late->step);
  warnings_.judge(late->batches, {.number = late->step, .norm = norm, .loss_scale = late->loss_scale, .late = true});
}

double OptimizerStep::clip(double max_norm) {
  const at::NoGradGuard no_grad;
  deps_.update.settle(Update::Next::kRead);
  finish_gradients(deps_.state);
  clip_once_ = std::min(max_norm, clip_once_.value_or(max_norm));
  return global_norm(deps_.state) / deps_.scaled_backward.gradient_scale();
}

void OptimizerStep::apply(double norm, double gradient_scale, double clip_once) {
  const double factor = optimizers::clip_factor(norm, {clip_once, deps_.state.plan.clip_norm});
  deps_.update.apply(factor / gradient_scale);
  note_update();
}

void OptimizerStep::note_update() {
  late_.note_update();
  deps_.watch.updated();
  deps_.consistency.update_done();
  deps_.progress.step_applied = true;
}

// The largest of gradients that overflow, and of what gave them, say nothing of the steps that come. Ranks of a tensor
// axis have parts of a layer's tensors, whose scale is that of the full one.
void OptimizerStep::end_fp8_step(bool applied, const at::Tensor& skip) {
  if (applied) {
    deps_.state.fp8->end_step(deps_.state.ranks.layer_ranks(), skip);
  } else {
    deps_.state.fp8->drop_step();
  }
}

void OptimizerStep::end_step() {
  note_peaks(deps_.state, deps_.progress);
  deps_.scaled_backward.drop();
  deps_.settings.forget_gradients();
  deps_.state.choose_gradients();
  deps_.update.step_over();
}

void OptimizerStep::agree(StepAgreement& agreement, bool updated) {
  bool parted = false;
  try {
    deps_.progress.loss = agreement.finish(parted, updated);
    if (agreement.buffers_differ()) warnings_.warn_of_buffers();
  } catch (...) {
    if (parted) deps_.consistency.slice_updated();  // what each rank has is no longer one model
    throw;
  }
}

void OptimizerStep::forget_gradient_changes() {
  clip_once_.reset();
  gradient_changes_ = 0;
  deps_.settings.forget_gradients();
}

StepFacts OptimizerStep::facts() {
  const CheckTime::Scope time;
  ModelState& state = deps_.state;
  const StepData& data = deps_.data;
  StepFacts facts;
  facts.loss = data.batches.loss_of_step();
  if (facts.loss.defined()) facts.loss = facts.loss.to(state.ranks.device);
  const TokenCounts& counts = deps_.scaled_backward.counts();
  if (counts.used()) facts.tokens = counts.own();
  facts.step = deps_.progress.global_steps;
  if (data.loader) facts.delivered = data.loader->delivered();
  if (data.sampler) facts.position = digest_of(data.sampler->state());
  facts.shared = data.shared.take(state.ranks.sequence.get(), state.ranks.device);
  facts.gradient_changes = std::exchange(gradient_changes_, 0) * kMixing;
  if (clip_once_) facts.gradient_changes += std::bit_cast<uint64_t>(*clip_once_) + 1;
  facts.settings = &deps_.settings;
  facts.stages = std::exchange(stages_, {});
  facts.micro_batches = std::exchange(micro_batches_, nullptr);
  facts.world = state.ranks.world.get();
  const ModelWatch::Digests changes = deps_.watch.take_digests();
  facts.changes = changes.all;
  facts.last_changed = deps_.watch.take_name();
  for (const Axis& axis : state.axes->list) {
    if (axis.same_data != nullptr) agree_along_axis(facts, *axis.same_data, changes.axis, state.ranks.device);
  }
  if (state.gatherer) {
    facts.gathers = state.gatherer->take_gather_digest();
    if (state.row_tables) facts.gathers ^= state.row_tables->take_digest();
    if (const comm::Communicator* const copies = state.ranks.groups.replicas.get()) {
      facts.gather_group = copies->rank();
      facts.gather_groups = copies->size();
    }
  }
  if (warnings_.looks_at_buffers()) facts.buffers = digest_of_buffers(*state.module);
  return facts;
}

}  // namespace ds::engine
