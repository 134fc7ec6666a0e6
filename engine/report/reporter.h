// What a run tells: the steps_per_print line, the profile of activation checkpoints, wall_clock_breakdown,
// memory_breakdown, monitors.
#pragma once

#include <cstdint>
#include <optional>

#include "dsengine/config.h"
#include "engine/state/model_state.h"
#include "engine/state/progress.h"
#include "profiling/monitor_list.h"
#include "profiling/step_timers.h"
#include "profiling/tensor_memory.h"
#include "profiling/throughput_meter.h"

namespace ds::engine {

// A step that is over, applied or skipped.
struct StepReport {
  const ModelState& state;
  const Progress& progress;
  int64_t train_batch_size = 0;
  double loss_scale = 1.0;
  std::optional<double> loss;  // of the global batch, where the engine knows it
};

// One per engine; writes on rank 0 only. Not thread safe.
class Reporter {
 public:
  // Throws IoError when a monitor's folder cannot be written. One that fails later is dropped with an error in the log:
  // the step it would report is applied.
  Reporter(const config::DsConfig& config, int rank);

  void backward_begins();
  void backward_ends();
  void step_begins();
  // The part of the step spent waiting for reductions that backward did not hide.
  void reductions_end();
  void step_ends(const StepReport& step);

 private:
  void print_step(const StepReport& step) const;
  void print_memory(const StepReport& step);
  // Of the regions that this thread began since the last line.
  static void print_checkpoints();
  void write_events(const StepReport& step);

  const bool is_first_rank_;
  const bool breakdown_;
  const bool memory_;
  const bool checkpoints_;
  const bool scales_loss_;
  const int64_t steps_per_print_;  // 0: never
  profiling::MonitorList monitors_;
  profiling::StepTimers timers_;
  profiling::ThroughputMeter throughput_;
  std::optional<profiling::TensorMemory> tensors_;  // memory_breakdown
  int64_t before_forward_ = 0;                      // bytes of tensors when forward began
  int64_t activation_bytes_ = 0;                    // most that a forward left for its backward since the last line
  double forward_begin_;                            // end of the last step or backward
  double backward_begin_ = 0;
  double step_begin_ = 0;
  double last_step_end_;
};

}  // namespace ds::engine
