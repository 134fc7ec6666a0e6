// The profile of a step's operations of an engine: the section flops_profiler.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/config.h"
#include "dsengine/profiling.h"
#include "model/state/model_state.h"
#include "profiling/device_clock.h"
#include "profiling/flops_report.h"
#include "profiling/module_work.h"

namespace ds::engine {

// One per engine, on all ranks, told of one step after the other. Watches the operators of the step that comes when
// profile_step steps are done (deepspeed/runtime/engine.py), once in a run; before and after it no operator is looked
// at. On the engine's thread.
class FlopsReport {
 public:
  // Throws IoError where rank 0 cannot write the output file. `model` outlives it.
  FlopsReport(const config::DsConfig& config, const ModelState& model);

  // Called when the next step begins after `steps` steps, for the first time or again.
  void step_comes(int64_t steps);
  void backward_begins();
  void backward_ends();
  void step_begins();
  // Reports the counts of the step that is over, on average over its micro-batches. Collective; rank 0 logs or writes
  // the text. A file that cannot be written any more is an error in the log: the step has been applied.
  void step_ends(int64_t micro_batches);

  const std::optional<profiling::FlopsProfile>& profile() const { return profile_; }
  // The useful operations of the whole model for a sample, on average; empty before the step has been profiled.
  const std::optional<profiling::ModuleWork::UsefulFlops>& of_sample() const { return of_sample_; }

 private:
  using Moment = profiling::DeviceClock::Moment;
  using Spans = std::vector<std::pair<Moment, Moment>>;

  profiling::StepFlops facts(const profiling::FlopsProfile& profile, int64_t micro_batches);
  void tell(const std::string& text) const;

  const config::FlopsProfilerSection section_;
  const int64_t batch_size_;
  const ModelState& model_;
  profiling::ModuleWork work_;
  profiling::DeviceClock clock_;
  bool profiles_ = false;  // the running step
  Spans forwards_;
  Spans backwards_;
  Moment step_begin_;
  Moment begin_;          // the begin of the step's first forward
  Moment forward_begin_;  // the begin of the running forward
  Moment backward_begin_;
  std::optional<profiling::FlopsProfile> profile_;
  std::optional<profiling::ModuleWork::UsefulFlops> of_sample_;
};

}  // namespace ds::engine
