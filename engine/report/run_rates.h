// The speed and the memory of a step, as points for the engine's monitors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/config.h"
#include "model/state/model_state.h"
#include "profiling/meters.h"
#include "profiling/module_work.h"
#include "profiling/monitor.h"

namespace ds::engine {

// One per engine with monitors, on rank 0. The model outlives it.
class RunRates {
 public:
  // With metrics.mfu and no peak in the config it measures that of the device.
  RunRates(const config::DsConfig& config, const ModelState& model);

  struct Step {
    double seconds = 0;
    int64_t samples = 0;  // of all ranks
    double tokens = 0;    // of all ranks, as the program has counted them; 0: it has not
    const profiling::ModuleWork::UsefulFlops* of_sample = nullptr;  // as flops_profiler has counted; null: it has not
  };
  // Adds a step's points at `place` of the x-axis: samples and tokens a second, MFU with all pairs of attention and
  // with those of a causal mask, memory. The first steps have no rates, as in ThroughputMeter.
  void add_to(std::vector<profiling::Event>& events, const Step& step, int64_t place);

 private:
  const config::MetricsSection section_;
  const ModelState& model_;
  double peak_ = 0;  // operations a second of all devices; 0: not asked for
  int64_t steps_ = 0;
};

}  // namespace ds::engine
