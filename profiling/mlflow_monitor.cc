// A run in the local file store of MLflow, as mlflow/store/tracking/file_store.py lays it out: a folder for each
// experiment, in it one for each run, with a meta.yaml in both, and a file for each metric.
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/ascii.h"
#include "core/files/atomic_file.h"
#include "core/log.h"
#include "core/text.h"
#include "profiling/monitor.h"

namespace ds::profiling {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMlflowSection = "metrics.mlflow";
// Values of mlflow.entities.RunStatus and SourceType.
constexpr int kRunning = 1;
constexpr int kFinished = 3;
constexpr int kLocalSource = 4;

int64_t now_ms() { return static_cast<int64_t>(wall_seconds() * 1e3); }

// A text in double quotes, which YAML reads as JSON writes it.
std::string yaml_text(const std::string& text) { return nlohmann::json(text).dump(); }

// A number of 32 hexadecimal digits, as MLflow names runs.
std::string new_run_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 32; ++i) id.push_back("0123456789abcdef"[random() % 16]);
  return id;
}

// The name of a metric as MLflow allows it: no other characters, and no part that leads out of the folder.
std::string metric_path(const std::string& event) {
  std::string path;
  for (const char c : event) {
    const bool is_mark = std::string_view("_-. :/").find(c) != std::string_view::npos;
    path.push_back(is_mark || is_ascii_letter(c) || is_ascii_digit(c) ? c : '_');
  }
  fs::path result;
  for (const fs::path& part : fs::path(path)) {
    if (part == "." || part == "..") {
      result /= std::string(part.native().size(), '_');
    } else if (!part.empty() && part != "/") {
      result /= part;
    }
  }
  return result.empty() ? "_" : result.string();
}

// The experiment `name` of a store, by the line of its meta.yaml; empty: there is none.
std::string find_experiment(const fs::path& store, const std::string& name) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(store, ignored)) {
    auto meta = classic_stream<std::ifstream>(entry.path() / "meta.yaml");
    for (std::string line; std::getline(meta, line);) {
      if (line == cat("name: ", name) || line == cat("name: ", yaml_text(name)))
        return entry.path().filename().string();
    }
  }
  return {};
}

class MlflowMonitor final : public Monitor {
 public:
  MlflowMonitor(const std::string& output_path, const std::string& job_name) : begin_(now_ms()), run_id_(new_run_id()) {
    const fs::path store = fs::absolute(make_monitor_folder(output_path, "", kMlflowSection)).lexically_normal();
    experiment_ = find_experiment(store, job_name);
    if (experiment_.empty()) {
      experiment_ = cat(begin_, ::getpid() % 1000);  // a number that no experiment of the store has
      make_folder(store / experiment_);
      write(store / experiment_ / "meta.yaml",
            cat("artifact_location: ", yaml_text("file://" + (store / experiment_).string()),
                "\ncreation_time: ", begin_, "\nexperiment_id: '", experiment_, "'\nlast_update_time: ", begin_,
                "\nlifecycle_stage: active\nname: ", yaml_text(job_name), '\n'));
    }
    run_ = store / experiment_ / run_id_;
    for (const char* part : {"metrics", "params", "tags", "artifacts"}) make_folder(run_ / part);
    write(run_ / "tags/mlflow.runName", run_name());
    write_run(kRunning);
  }

  ~MlflowMonitor() override {
    try {
      write_run(kFinished);
    } catch (const std::exception& error) {
      log::error(error.what());
    }
  }
  MlflowMonitor(const MlflowMonitor&) = delete;
  MlflowMonitor& operator=(const MlflowMonitor&) = delete;

  void write_events(const std::vector<Event>& events) override {
    const int64_t now = now_ms();
    std::map<std::string, std::string> lines;
    for (const Event& event : events) {
      lines[metric_path(event.name)] += cat(now, ' ', shortest_text(event.value), ' ', event.step, '\n');
    }
    for (const auto& [name, text] : lines) {
      const fs::path path = run_ / "metrics" / name;
      make_folder(path.parent_path());
      auto file = classic_stream<std::ofstream>(path, std::ios::app);
      file << text;
      if (!file.flush()) fail_to_write(kMlflowSection, path.string());
    }
  }

 private:
  static void make_folder(const fs::path& folder) {
    std::error_code error;
    fs::create_directories(folder, error);
    errno = error.value();
    if (error) fail_to_write(kMlflowSection, folder.string());
  }
  static void write(const fs::path& path, const std::string& text) {
    write_whole_file(path.string(), text, /*durable=*/false);
  }
  std::string run_name() const { return cat("dsengine-", run_id_.substr(0, 8)); }

  void write_run(int status) const {
    const std::string end = status == kRunning ? "null" : cat(now_ms());
    write(run_ / "meta.yaml",
          cat("artifact_uri: ", yaml_text("file://" + (run_ / "artifacts").string()), "\nend_time: ", end,
              "\nentry_point_name: ''\nexperiment_id: '", experiment_, "'\nlifecycle_stage: active\nrun_id: ", run_id_,
              "\nrun_name: ", run_name(), "\nrun_uuid: ", run_id_, "\nsource_name: ''\nsource_type: ", kLocalSource,
              "\nsource_version: ''\nstart_time: ", begin_, "\nstatus: ", status, "\ntags: []\nuser_id: '", ::getuid(),
              "'\n"));
  }

  int64_t begin_;
  std::string run_id_;
  std::string experiment_;
  fs::path run_;
};

}  // namespace

std::unique_ptr<Monitor> make_mlflow_monitor(const std::string& output_path, const std::string& job_name) {
  return std::make_unique<MlflowMonitor>(output_path, job_name);
}

}  // namespace ds::profiling
