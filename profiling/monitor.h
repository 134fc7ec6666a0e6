// The monitors of a ds_config, and the list of a run's monitors (dsengine/monitor.h). Torch-free.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/monitor.h"

namespace ds::profiling {

// One CSV file per event name below output_path/job_name: "Train/Samples/lr" goes to Train_Samples_lr.csv, lines
// "step,value" under the header "step,lr". Appends to what an earlier run wrote. Throws IoError when the folder cannot
// be made or written.
std::unique_ptr<Monitor> make_csv_monitor(const std::string& output_path, const std::string& job_name);

// An event file for TensorBoard in output_path/job_name; each run adds its own. Throws IoError when it cannot be made.
std::unique_ptr<Monitor> make_tensorboard_monitor(const std::string& output_path, const std::string& job_name);

// A file output_path/job_name/metrics.jsonl with a JSON object a line, {"step":8,"time":1.7e9,"lr":0.1,...}: events of
// one call with one step share a line, `time` is in seconds since 1970, and numbers that are not finite are the texts
// "NaN", "Infinity" and "-Infinity". Events that are named step or time become step_ and time_. Appends to what an
// earlier run wrote. Throws IoError when it cannot be written.
std::unique_ptr<Monitor> make_json_lines_monitor(const std::string& output_path, const std::string& job_name);

// A file output_path/job_name.prom with the last value of each name as a gauge in the text format that OpenMetrics and
// Prometheus share: what the textfile collector of node_exporter reads. The file is replaced as a whole, so that nobody
// reads half of it. "Train/Samples/lr" becomes dsengine_train_samples_lr{job="JOB_NAME",name="Train/Samples/lr"}.
// Throws IoError when it cannot be written.
std::unique_ptr<Monitor> make_openmetrics_monitor(const std::string& output_path, const std::string& job_name);

// A run in a file store of MLflow at output_path (mlflow ui --backend-store-uri output_path), in the experiment
// job_name, which is made or found by its name: meta.yaml files, and for each name a file of lines "time value step"
// with the time in milliseconds. The run is marked as finished at the monitor's end. Throws IoError when it cannot be
// written.
std::unique_ptr<Monitor> make_mlflow_monitor(const std::string& output_path, const std::string& job_name);

// Formats a number as the shortest text that reads back as the same one.
std::string shortest_text(double value);
// The number of seconds since 1970.
double wall_seconds();

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
