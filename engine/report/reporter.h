// The reports of a run: its phases as observers see them, the steps_per_print line, the profile of activation
// checkpoints, wall_clock_breakdown, memory_breakdown, monitors, the flops profile.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "config/order/call_order.h"
#include "core/text.h"
#include "core/trace_span.h"
#include "dsengine/comm.h"
#include "dsengine/config.h"
#include "dsengine/trace.h"
#include "engine/report/flops_report.h"
#include "engine/report/logged_values.h"
#include "engine/report/run_rates.h"
#include "model/state/model_state.h"
#include "model/state/progress.h"
#include "profiling/device_clock.h"
#include "profiling/meters.h"
#include "profiling/monitor.h"
#include "profiling/tensor_memory.h"

namespace ds::engine {

// Tells the observers of the world group what this rank is doing, for reports of a stall and for traces. Used on the
// engine's thread. Keeps the group, and so what watches it, alive as long as it lives itself.
class Phases {
 public:
  static constexpr const char* kBetweenCalls = "the program (data, forward)";

  // `progress` and `micro_batches` outlive it.
  Phases(const Progress& progress, const MicroBatchCounter& micro_batches)
      : progress_(progress), micro_batches_(micro_batches) {}
  // Sets the group whose observers are told; until then nobody is.
  void tell(std::shared_ptr<comm::Communicator> world) { world_ = std::move(world); }

  // Tells the observers that `phase`, a string literal, begins.
  void note(const char* phase) const {
    current_ = phase;
    if (world_) world_->note_phase(phase, progress_.global_steps + 1, micro_batches_.done());
  }

  // Tells the observers that a phase begins, and, when it is destroyed, that what ran before goes on. Messages about
  // ranks that differ name the phase as the call in which the program is.
  class Scope {
   public:
    Scope(const Phases& phases, const char* phase)
        : phases_(phases), before_(phases.current_), span_([phase] { return cat("dsengine: ", phase); }) {
      phases_.note(phase);
    }
    ~Scope() { phases_.note(before_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Phases& phases_;
    const char* before_;
    const TraceSpan span_;
  };

 private:
  std::shared_ptr<comm::Communicator> world_;  // null before initialize has it
  mutable const char* current_ = kBetweenCalls;
  const Progress& progress_;
  const MicroBatchCounter& micro_batches_;
};

// A step that is over, applied or skipped.
struct StepReport {
  const ModelState& state;
  const Progress& progress;
  int64_t micro_batches = 1;
  int64_t train_batch_size = 0;
  double loss_scale = 1.0;
  std::optional<double> loss;  // the loss of the global batch, where the engine knows it
  double tokens = 0;           // the sum of the counts of backward_mean() over ranks, where it was called
};

// One per engine, on all ranks; writes on rank 0 only. Not thread safe.
class Reporter {
 public:
  // Throws IoError when a monitor's folder or the file of the flops profile cannot be written. One that fails later is
  // dropped with an error in the log: the step it would report is applied. `config` and `model` outlive it; the model
  // has the device whose time the breakdown tells: one step later where it is not the CPU.
  Reporter(const config::DsConfig& config, const ModelState& model);

  // Called before the first micro-batch of a step, after `steps` steps; perhaps again, if the micro-batch is repeated.
  void step_comes(int64_t steps);
  void backward_begins();
  void backward_ends();
  void step_begins();
  // Called when the step has waited for the reductions that backward did not hide.
  void reductions_end();
  // Whether step_ends() will report numbers of this step that a device may not have told yet.
  bool needs_numbers(int64_t step) const {
    return is_first_rank_ && (!monitors_.empty() || (steps_per_print_ > 0 && step % steps_per_print_ == 0));
  }
  // Collective in the step whose flops are profiled.
  void step_ends(const StepReport& step);
  // The values of Engine::log() until they are written; null on all ranks where there are no monitors.
  LoggedValues* logged() { return logged_ ? &*logged_ : nullptr; }
  // Writes them after `steps` steps if it is time to, and at the end of an epoch, after `epoch_end` samples, in any
  // case. Collective over data-parallel ranks; throws UsageError on all of them where they have logged different names.
  void write_logged(int64_t steps, std::optional<int64_t> epoch_end = std::nullopt);
  // Called outside of all phases after `steps` steps, again or for the first time: the trace of the section "trace"
  // begins a step where there is a new one. A trace that cannot be written is an error in the log and ends the traces.
  void trace_step(int64_t steps);
  // Adds a monitor of the program's, on all ranks; null but on rank 0.
  void add_monitor(std::unique_ptr<profiling::Monitor> monitor);
  // The flops report; null without flops_profiler.
  const FlopsReport* flops() const { return flops_ ? &*flops_ : nullptr; }

 private:
  using Moment = profiling::DeviceClock::Moment;

  void tell_step(const StepReport& step);
  void print_step(const StepReport& step) const;
  void print_memory(const StepReport& step);
  // Prints the profile of the regions that this thread began since the last line.
  static void print_checkpoints();
  void write_events(const StepReport& step, double seconds);
  void add(profiling::Phase phase, const Moment& from, const Moment& to);
  // Reports the times of the step that is over, or of the one before; `samples`: its samples.
  void tell_times(int64_t samples);

  const bool is_first_rank_;
  const bool breakdown_;
  const bool memory_;
  const bool checkpoints_;
  const bool scales_loss_;
  const int64_t steps_per_print_;       // 0: never
  profiling::MonitorList monitors_;     // of rank 0
  std::optional<RunRates> rates_;       // on rank 0, where there are monitors
  std::optional<LoggedValues> logged_;  // on all ranks, where there are monitors
  const ModelState& model_;
  const config::DsConfig& config_;
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
  std::vector<Span> spans_;       // the spans of the running step, where times are a device's
  std::vector<Span> past_spans_;  // the spans of the step before
  int64_t past_samples_ = 0;      // samples of the step before
  double last_step_end_;          // by the host's clock
  int64_t traced_steps_ = 0;
  std::optional<profiling::Profiler> profiler_;  // on ranks of the section "trace"
};

}  // namespace ds::engine
