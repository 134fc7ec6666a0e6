// tensorboard, csv_monitor, wandb, comet. Field names and defaults are the keys and defaults of ds_config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ds::engine::config {

// Events go to output_path/job_name.
struct TensorboardSection {
  bool enabled = false;
  std::string output_path;
  std::string job_name = "DeepSpeedJobName";
};

using CsvMonitorSection = TensorboardSection;

// Python SDKs: read, checked and warned about, never used.
struct WandbSection {
  bool enabled = false;
  std::optional<std::string> group;
  std::optional<std::string> team;
  std::string project = "deepspeed";
};

struct CometSection {
  bool enabled = false;
  int64_t samples_log_interval = 100;
  std::optional<std::string> project;
  std::optional<std::string> workspace;
  std::optional<std::string> api_key;
  std::optional<std::string> experiment_name;
  std::optional<std::string> experiment_key;
  std::optional<bool> online;
  std::optional<std::string> mode;
};

}  // namespace ds::engine::config
