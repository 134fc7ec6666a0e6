// Monitors that write for other programs: lines of JSON, and the text file of node_exporter.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/ascii.h"
#include "core/files/atomic_file.h"
#include "core/text.h"
#include "profiling/monitor.h"

namespace ds::profiling {
namespace {

constexpr const char* kJsonLinesSection = "metrics.json_lines";
constexpr const char* kOpenMetricsSection = "metrics.openmetrics";

// JSON has no numbers that are not finite.
nlohmann::ordered_json json_number(double value) {
  if (std::isfinite(value)) return value;
  if (std::isnan(value)) return "NaN";
  return value > 0 ? "Infinity" : "-Infinity";
}

class JsonLinesMonitor final : public Monitor {
 public:
  JsonLinesMonitor(const std::string& output_path, const std::string& job_name)
      : path_((std::filesystem::path(make_monitor_folder(output_path, job_name, kJsonLinesSection)) / "metrics.jsonl")
                  .string()),
        file_(classic_stream<std::ofstream>()) {
    file_.open(path_, std::ios::app);
    if (!file_) fail_to_write(kJsonLinesSection, path_);
  }

  void write_events(const std::vector<Event>& events) override {
    for (size_t first = 0; first < events.size();) {
      nlohmann::ordered_json line = {{"step", events[first].step}, {"time", wall_seconds()}};
      size_t next = first;
      for (; next < events.size() && events[next].step == events[first].step; ++next) {
        const std::string& name = events[next].name;
        line[name == "step" || name == "time" ? name + "_" : name] = json_number(events[next].value);
      }
      file_ << line.dump() << '\n';
      first = next;
    }
    if (!file_.flush()) fail_to_write(kJsonLinesSection, path_);
  }

 private:
  std::string path_;
  std::ofstream file_;
};

// Letters, digits and underscores, as names of metrics have.
std::string metric_name(const std::string& event) {
  std::string name = "dsengine_";
  for (const char c : event) {
    name.push_back(is_ascii_letter(c) || is_ascii_digit(c) ? ascii_lower(c) : '_');
  }
  return name;
}

std::string escaped(const std::string& label) {
  std::string text;
  for (const char c : label) {
    if (c == '\n') {
      text += "\\n";
      continue;
    }
    if (c == '\\' || c == '"') text.push_back('\\');
    text.push_back(c);
  }
  return text;
}

std::string metric_value(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return shortest_text(value);
}

class OpenMetricsMonitor final : public Monitor {
 public:
  OpenMetricsMonitor(const std::string& output_path, const std::string& job_name)
      : path_((std::filesystem::path(make_monitor_folder(output_path, "", kOpenMetricsSection)) / (job_name + ".prom"))
                  .string()),
        job_(job_name) {
    const AtomicFile probe(path_);
  }

  void write_events(const std::vector<Event>& events) override {
    for (const Event& event : events) {
      values_[event.name] = event.value;
      samples_ = std::max(samples_, event.step);
    }
    // Two names may become one metric: their label tells them apart.
    std::map<std::string, std::string> metrics;
    metrics["dsengine_samples"] = cat("dsengine_samples{job=\"", escaped(job_), "\"} ", samples_, '\n');
    for (const auto& [name, value] : values_) {
      const std::string metric = metric_name(name);
      metrics[metric] +=
          cat(metric, "{job=\"", escaped(job_), "\",name=\"", escaped(name), "\"} ", metric_value(value), '\n');
    }
    std::string text;
    for (const auto& [metric, lines] : metrics) text += cat("# TYPE ", metric, " gauge\n", lines);
    text += "# EOF\n";
    write_whole_file(path_, text, /*durable=*/false);
  }

 private:
  std::string path_;
  std::string job_;
  std::map<std::string, double> values_;
  int64_t samples_ = 0;
};

}  // namespace

std::unique_ptr<Monitor> make_json_lines_monitor(const std::string& output_path, const std::string& job_name) {
  return std::make_unique<JsonLinesMonitor>(output_path, job_name);
}

std::unique_ptr<Monitor> make_openmetrics_monitor(const std::string& output_path, const std::string& job_name) {
  return std::make_unique<OpenMetricsMonitor>(output_path, job_name);
}

}  // namespace ds::profiling
