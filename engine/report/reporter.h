// What a run tells: the steps_per_print line, the profile of activation checkpoints, wall_clock_breakdown,
// memory_breakdown, monitors, the flops profile.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dsengine/config.h"
#include "engine/report/flops_report.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "profiling/device_clock.h"
#include "profiling/monitor_list.h"
#include "profiling/step_timers.h"
#include "profiling/tensor_memory.h"
#include "profiling/throughput_meter.h"

namespace ds::engine {

// A step that is over, applied or skipped.
struct StepReport {
  const ModelState& state;
  const Progress& progress;
  int64_t micro_batches = 1;
  int64_t train_batch_size = 0;
  double loss_scale = 1.0;
  std::optional<double> loss;  // of the global batch, where the engine knows it
};

// One per engine, on all ranks; writes on rank 0 only. Not thread safe.
class Reporter {
 public:
  // Throws IoError when a monitor's folder or the file of the flops profile cannot be written. One that fails later is
  // dropped with an error in the log: the step it would report is applied. `model`, which outlives it, has the device
  // whose time the breakdown tells: one step later where it is not the CPU.
  Reporter(const config::DsConfig& config, const ModelState& model);

  // The first micro-batch of a step comes, after `steps` of them, perhaps again.
  void step_comes(int64_t steps);
  void backward_begins();
  void backward_ends();
  void step_begins();
  // The part of the step spent waiting for reductions that backward did not hide.
  void reductions_end();
  // Whether step_ends() will tell numbers of this step that a device may not have told yet.
  bool needs_numbers(int64_t step) const {
    return is_first_rank_ && (!monitors_.empty() || (steps_per_print_ > 0 && step % steps_per_print_ == 0));
  }
  // Collective in the step whose flops are profiled.
  void step_ends(const StepReport& step);
  // Null: without flops_profiler.
  const FlopsReport* flops() const { return flops_ ? &*flops_ : nullptr; }

 private:
  using Moment = profiling::DeviceClock::Moment;

  void tell_step(const StepReport& step);
  void print_step(const StepReport& step) const;
  void print_memory(const StepReport& step);
  // Of the regions that this thread began since the last line.
  static void print_checkpoints();
  void write_events(const StepReport& step);
  void add(profiling::Phase phase, const Moment& from, const Moment& to);
  // The times of the step that is over, or of the one before, whose samples those are.
  void tell_times(int64_t samples);

  const bool is_first_rank_;
  const bool breakdown_;
  const bool memory_;
  const bool checkpoints_;
  const bool scales_loss_;
  const int64_t steps_per_print_;  // 0: never
  profiling::MonitorList monitors_;
  profiling::StepTimers timers_;
  profiling::ThroughputMeter throughput_;
  std::optional<FlopsReport> flops_;                // flops_profiler
  std::optional<profiling::TensorMemory> tensors_;  // memory_breakdown
  int64_t before_forward_ = 0;                      // bytes of tensors when forward began
  int64_t activation_bytes_ = 0;                    // most that a forward left for its backward since the last line
  const bool late_;                                 // times are a device's
  profiling::DeviceClock clock_;
  Moment forward_begin_;  // end of the last step or backward
  Moment backward_begin_;
  Moment step_begin_;
  struct Span {
    profiling::Phase phase;
    Moment from;
    Moment to;
  };
  std::vector<Span> spans_;       // of the running step, where times are a device's
  std::vector<Span> past_spans_;  // of the step before
  int64_t past_samples_ = 0;      // likewise
  double last_step_end_;          // by the host's clock
};

}  // namespace ds::engine
