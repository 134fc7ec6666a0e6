// The monitors that training writes its curves to. Torch-free.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ds::profiling {

// One point of a curve. DeepSpeed's names: "Train/Samples/lr", "Train/Samples/loss_scale", ...; step is its x-axis,
// global samples.
struct Event {
  std::string name;
  double value = 0.0;
  int64_t step = 0;
};

// A destination for curves. Exists on rank 0 only. Not thread safe.
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

// The monitors of a run. Curves are not worth a run: a monitor that cannot write any more (a full disk) is dropped, and
// the log says so once. Not thread safe.
class MonitorList {
 public:
  void add(std::unique_ptr<Monitor> monitor) { monitors_.push_back(std::move(monitor)); }
  bool empty() const { return monitors_.empty(); }
  // Writes to every monitor. Throws nothing that a monitor throws.
  void write_events(const std::vector<Event>& events);

 private:
  std::vector<std::unique_ptr<Monitor>> monitors_;
};

// Makes output_path/job_name and the folders above it. Throws IoError naming the folder and the system's reason, also
// when files cannot be made in it. `section` is the config section to name ("csv_monitor").
std::string make_monitor_folder(const std::string& output_path, const std::string& job_name, const char* section);

// Throws the IoError of a monitor that cannot write `path`, with the system's reason (errno).
[[noreturn]] void fail_to_write(const char* section, const std::string& path);

}  // namespace ds::profiling
