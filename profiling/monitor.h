// Where training writes its curves. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ds::profiling {

// One point of a curve. DeepSpeed's names: "Train/Samples/lr", "Train/Samples/loss_scale", ...; step is its x-axis,
// global samples.
struct Event {
  std::string name;
  double value = 0.0;
  int64_t step = 0;
};

// Made on rank 0 only. Not thread safe.
class Monitor {
 public:
  virtual ~Monitor() = default;
  // Appends and flushes. Throws IoError, for example when the disk is full.
  virtual void write_events(const std::vector<Event>& events) = 0;
};

// One CSV file per event name below output_path/job_name: "Train/Samples/lr" goes to Train_Samples_lr.csv, lines
// "step,value" under the header "step,lr". Appends to what an earlier run wrote. Throws IoError when the folder cannot
// be made or written.
std::unique_ptr<Monitor> make_csv_monitor(const std::string& output_path, const std::string& job_name);

// An event file for TensorBoard in output_path/job_name; each run adds its own. Throws IoError when it cannot be made.
std::unique_ptr<Monitor> make_tensorboard_monitor(const std::string& output_path, const std::string& job_name);

}  // namespace ds::profiling
