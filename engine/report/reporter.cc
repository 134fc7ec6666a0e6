#include "engine/report/reporter.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "core/log.h"
#include "core/without_stack.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "model/state/held_bytes.h"
#include "profiling/meters.h"

namespace ds::engine {
namespace {

using profiling::Phase;

std::string list_of(const std::vector<double>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += cat(i == 0 ? "" : ", ", values[i]);
  return text + "]";
}

// Values of Engine::log() are written after so many steps where steps_per_print does not say.
constexpr int64_t kStepsPerWriting = 10;
constexpr int64_t kMostStepsHeld = 1000;  // of logged values in memory

// A monitor of the config, and what makes it.
struct MonitorRow {
  const config::TensorboardSection& section;
  std::unique_ptr<profiling::Monitor> (*make)(const std::string& output_path, const std::string& job_name);
};

std::array<MonitorRow, 5> monitors_of(const config::DsConfig& config) {
  return {{{config.csv_monitor, &profiling::make_csv_monitor},
           {config.tensorboard, &profiling::make_tensorboard_monitor},
           {config.metrics.json_lines, &profiling::make_json_lines_monitor},
           {config.metrics.openmetrics, &profiling::make_openmetrics_monitor},
           {config.metrics.mlflow, &profiling::make_mlflow_monitor}}};
}

}  // namespace

Reporter::Reporter(const config::DsConfig& config, const ModelState& model)
    : is_first_rank_(model.ranks.world->rank() == 0),
      breakdown_(config.wall_clock_breakdown),
      memory_(config.memory_breakdown),
      checkpoints_(config.activation_checkpointing.profile),
      scales_loss_(config.fp16.enabled),
      steps_per_print_(config.steps_per_print.value_or(0)),
      model_(model),
      config_(config),
      late_(breakdown_ && is_first_rank_ && !model.ranks.device.is_cpu()),
      clock_(late_ ? model.ranks.device : at::Device(at::kCPU)),
      forward_begin_(clock_.mark()),
      last_step_end_(profiling::monotonic_seconds()) {
  if (config.flops_profiler.enabled) flops_.emplace(config, model);
  if (memory_ && is_first_rank_) tensors_.emplace();
  const config::TraceSection& trace = config.trace;
  const int64_t rank = model.ranks.world->rank();
  if (trace.enabled && (trace.ranks.empty() || std::count(trace.ranks.begin(), trace.ranks.end(), rank) > 0)) {
    profiler_.emplace(profiling::profile(
        {.schedule = {.wait = trace.wait, .warmup = trace.warmup, .active = trace.active, .repeat = trace.repeat},
         .on_trace_ready = profiling::write_traces(trace.output_path),
         .record_shapes = trace.record_shapes,
         .profile_memory = trace.profile_memory,
         .rank = static_cast<int>(rank)}));
  }
  for (const MonitorRow& row : monitors_of(config)) {
    if (row.section.enabled) {
      add_monitor(is_first_rank_ ? row.make(row.section.output_path, row.section.job_name) : nullptr);
    }
  }
}

void Reporter::trace_step(int64_t steps) {
  if (!profiler_ || std::exchange(traced_steps_, steps) == steps) return;
  try {
    profiler_->step();
  } catch (const std::exception& error) {  // the step has been made
    log::error(without_stack(error.what()), ". Training goes on without traces");
    profiler_.reset();
  }
}

void Reporter::add_monitor(std::unique_ptr<profiling::Monitor> monitor) {
  if (!logged_) logged_.emplace(model_);
  if (!is_first_rank_) return;
  if (!rates_) rates_.emplace(config_, model_);
  monitors_.add(std::move(monitor));
}

void Reporter::write_logged(int64_t steps, std::optional<int64_t> epoch_end) {
  const int64_t every = steps_per_print_ > 0 ? std::min(steps_per_print_, kMostStepsHeld) : kStepsPerWriting;
  const bool is_time = epoch_end || steps % every == 0;
  if (logged_ && is_time) monitors_.write_events(logged_->take(epoch_end));
}

void Reporter::add(Phase phase, const Moment& from, const Moment& to) {
  if (late_) {
    spans_.push_back({phase, from, to});
  } else {
    timers_.add(phase, profiling::DeviceClock::seconds(from, to));
  }
}

void Reporter::step_comes(int64_t steps) {
  if (flops_) flops_->step_comes(steps);
}

void Reporter::backward_begins() {
  if (flops_) flops_->backward_begins();
  backward_begin_ = clock_.mark();
  if (tensors_) activation_bytes_ = std::max(activation_bytes_, tensors_->live_bytes() - before_forward_);
  // The time between two calls of the engine is the program's forward.
  add(Phase::kForward, forward_begin_, backward_begin_);
}

void Reporter::backward_ends() {
  if (flops_) flops_->backward_ends();
  forward_begin_ = clock_.mark();
  if (tensors_) before_forward_ = tensors_->live_bytes();
  add(Phase::kBackward, backward_begin_, forward_begin_);
  add(Phase::kBackwardInner, backward_begin_, forward_begin_);
}

void Reporter::step_begins() {
  if (flops_) flops_->step_begins();
  step_begin_ = clock_.mark();
}

void Reporter::reductions_end() { add(Phase::kBackwardReduce, step_begin_, clock_.mark()); }

void Reporter::step_ends(const StepReport& step) {
  if (flops_) flops_->step_ends(step.micro_batches);
  tell_step(step);
  step_comes(step.progress.global_steps);
}

void Reporter::tell_step(const StepReport& step) {
  const double now = profiling::monotonic_seconds();
  forward_begin_ = clock_.mark();
  add(Phase::kStep, step_begin_, forward_begin_);
  const double seconds = now - std::exchange(last_step_end_, now);
  throughput_.add_step(seconds, step.train_batch_size);
  if (logged_) logged_->step_ends(step.progress.global_samples);
  if (tensors_) before_forward_ = tensors_->live_bytes();
  if (!is_first_rank_) return;
  if (!monitors_.empty()) write_events(step, seconds);
  if (steps_per_print_ > 0 && step.progress.global_steps % steps_per_print_ == 0) {
    print_step(step);
    if (checkpoints_) print_checkpoints();
  }
  if (memory_) print_memory(step);
  if (!late_) return tell_times(step.progress.global_samples);
  // The device has come to the end of the step before, and has this one to do meanwhile.
  for (const Span& span : past_spans_) timers_.add(span.phase, profiling::DeviceClock::seconds(span.from, span.to));
  if (!past_spans_.empty()) tell_times(past_samples_);
  past_spans_ = std::exchange(spans_, {});
  past_samples_ = step.progress.global_samples;
}

void Reporter::tell_times(int64_t samples) {
  if (breakdown_ && !monitors_.empty()) {
    std::vector<profiling::Event> events;
    for (const auto& [name, phase] : {std::pair{"forward", Phase::kForward}, std::pair{"backward", Phase::kBackward},
                                      std::pair{"step", Phase::kStep}}) {
      events.push_back({cat("Train/Samples/elapsed_time_ms_", name), timers_.step_seconds(phase) * 1e3, samples});
    }
    monitors_.write_events(events);
  }
  const std::string micro_times = timers_.finish_micro_step();
  const std::string step_times = timers_.finish_step();
  if (!breakdown_) return;
  log::info(micro_times);
  log::info(step_times);
}

void Reporter::print_step(const StepReport& step) const {
  std::string momenta = "[";
  for (const std::vector<double>& group : step.state.optimizer.momenta()) {
    momenta += cat(momenta == "[" ? "" : ", ", list_of(group));
  }
  const std::string loss = step.loss ? cat(", loss=", *step.loss) : "";
  log::info("step=", step.progress.global_steps, loss, ", skipped=", step.progress.skipped_steps(),
            ", lr=", list_of(step.state.optimizer.learning_rates()), ", mom=", momenta, "], ", throughput_.summary());
}

void Reporter::print_memory(const StepReport& step) {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const auto mebibytes = [](int64_t bytes) { return fixed(static_cast<double>(bytes) / kMebibyte, 1); };
  const HeldBytes held = held_bytes(step.state, step.progress);
  const zero::ModelStateBytes& state = held.state;
  log::info("memory (MiB) after step ", step.progress.global_steps, ": resident ",
            mebibytes(profiling::resident_bytes()), ", peak ", mebibytes(profiling::peak_resident_bytes()),
            "; model state ", mebibytes(state.total()), " = parameters ", mebibytes(state.parameters), " + gradients ",
            mebibytes(state.gradients), " + master ", mebibytes(state.master), " + optimizer ",
            mebibytes(state.optimizer), "; gathered at most ", mebibytes(held.gathered), "; activations ",
            mebibytes(activation_bytes_), " (", activation_bytes_, " bytes, for ds-tool check --activation_bytes)");
  activation_bytes_ = 0;
}

void Reporter::print_checkpoints() {
  constexpr double kMebibyte = 1024.0 * 1024.0;
  const recompute::CheckpointStatistics sum = recompute::take_checkpoint_statistics();
  log::info("activation checkpoints: ", sum.regions, " regions, ", sum.recomputations, " recomputations, ",
            fixed(static_cast<double>(sum.bytes_kept) / kMebibyte, 1),
            " MiB of inputs kept; time (ms) | forward: ", fixed(sum.forward_seconds * 1e3, 2),
            " | recomputation: ", fixed(sum.recomputation_seconds * 1e3, 2));
}

void Reporter::write_events(const StepReport& step, double seconds) {
  const int64_t samples = step.progress.global_samples;
  std::vector<profiling::Event> events;
  if (step.loss) events.push_back({"Train/Samples/train_loss", *step.loss, samples});
  events.push_back({"Train/Samples/lr", step.state.optimizer.learning_rates().front(), samples});
  if (scales_loss_) events.push_back({"Train/Samples/loss_scale", step.loss_scale, samples});
  if (step.progress.gradient_norm) events.push_back({"Train/Samples/grad_norm", *step.progress.gradient_norm, samples});
  rates_->add_to(events,
                 {.seconds = seconds,
                  .samples = step.train_batch_size,
                  .tokens = step.tokens,
                  .of_sample = flops_ && flops_->of_sample() ? &*flops_->of_sample() : nullptr},
                 samples);
  monitors_.write_events(events);
}

}  // namespace ds::engine
