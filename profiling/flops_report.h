// The text of a flops profile, with the lines of DeepSpeed's flops profiler. Torch-free.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/profiling.h"

namespace ds::profiling {

// Adds a part of a module to it, without its name and place.
void add_part(ModuleFlops& module, const ModuleFlops& part);
void divide_by(ModuleFlops& module, int64_t times);

// The facts about a profiled step; those of one micro-batch on one rank, but for what says otherwise.
struct StepFlops {
  int64_t step = 0;
  int64_t world_size = 1;
  int64_t data_parallel_size = 1;
  int64_t model_parallel_size = 1;  // ranks that have parts of one model: of a pipeline, of a tensor axis
  int64_t batch_size = 1;
  int64_t parameters = 0;                 // the elements of this rank
  int64_t model_parameters = 0;           // the elements of the full model
  int64_t model_flops = 0;                // the operations of forward, over all parts of the model
  double recompute_fwd_factor = 0;        // the config's, for the line as DeepSpeed reckons it
  std::optional<double> forward_seconds;  // empty: mixed with backward (a pipeline)
  double backward_seconds = 0;            // else of both
  double step_seconds = 0;                // the time of the update
  double iteration_seconds = 0;           // the time of a full step, all its micro-batches
  int64_t micro_batches = 1;
};

struct FlopsReportOptions {
  ProfileFlopsOptions modules;
  bool host_times = true;  // false: modules have none, a device runs behind the host
};

// Writes the text. `step`: null where no engine trains.
std::string flops_report(const StepFlops* step, const FlopsProfile& profile, const FlopsReportOptions& options);

// Numbers with a prefix: "532", "12.50 M", for seconds "1.20 ms"; with a unit "532 FLOPS", "12.50 MFLOPS".
std::string with_prefix(double value, const std::string& unit = "");
std::string duration(double seconds);

}  // namespace ds::profiling
