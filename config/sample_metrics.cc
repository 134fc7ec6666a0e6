#include "config/difficulty_checks.h"

#include <optional>
#include <string>
#include <utility>

#include "config/describe.h"
#include "core/text.h"

namespace ds::engine::config {
namespace {

using efficiency::DifficultySchedule;

// The keys of one metric.
struct SampleMetricKeys {
  std::optional<std::string> index_to_sample_path;
  std::optional<std::string> index_to_metric_path;
  std::optional<std::string> difficulty_type;
  std::optional<std::string> clustering_type;
  CurriculumLearningSection schedule;
};

void require_path(JsonFields& json, const char* key, const std::optional<std::string>& path, const char* why) {
  if (path && !path->empty()) return;
  json.error(key, cat("expected the path of a file of DeepSpeed's DataAnalyzer, without .bin and .idx, found none; ",
                      why, " needs it"));
}

void require_rise(JsonFields& json, const DifficultySchedule& schedule) {
  for (size_t i = 1; i < schedule.difficulty.size(); ++i) {
    if (schedule.difficulty[i] >= schedule.difficulty[i - 1]) continue;
    json.error("schedule_config",
               cat("expected difficulties that do not fall, for samples that are admitted stay so, found ",
                   schedule.difficulty[i], " behind ", schedule.difficulty[i - 1]));
    return;
  }
}

void describe_sample_metric(JsonFields& json, SampleMetricKeys& keys) {
  CurriculumLearningSection& s = keys.schedule;
  json.field("index_to_sample_path", keys.index_to_sample_path);
  json.field("index_to_metric_path", keys.index_to_metric_path);
  json.choice("difficulty_type", keys.difficulty_type, {"value", "percentile"});
  json.choice("clustering_type", keys.clustering_type, {"single_cluster", "schedule_based"});
  json.field("min_difficulty", s.min_difficulty);
  json.field("max_difficulty", s.max_difficulty);
  json.field("schedule_type", s.schedule_type);
  json.section("schedule_config", s.schedule_config, config::describe, UnknownKeys::kWarn);
  if (!json.reading()) return;
  s.enabled = true;
  read_schedule(json, s);
  if (!keys.difficulty_type) json.error("difficulty_type", "expected value or percentile, found none");
  if (!keys.clustering_type) json.error("clustering_type", "expected single_cluster or schedule_based, found none");
  if (keys.clustering_type != "schedule_based") return;
  require_path(json, "index_to_sample_path", keys.index_to_sample_path, "clustering_type schedule_based");
  if (keys.difficulty_type == "value") {
    require_path(json, "index_to_metric_path", keys.index_to_metric_path, "difficulty_type value");
  }
  require_rise(json, s.schedule);
}

}  // namespace

void describe_sample_metrics(JsonFields& json, CurriculumSection& section) {
  section.metrics.clear();
  for (const auto& item : section.curriculum_metrics.items()) {
    SampleMetricKeys keys;
    json.section(item.key(), keys, describe_sample_metric, UnknownKeys::kWarn);
    section.metrics.push_back({.name = item.key(),
                               .index_to_sample_path = keys.index_to_sample_path.value_or(""),
                               .index_to_metric_path = keys.index_to_metric_path.value_or(""),
                               .by_percentile = keys.difficulty_type == "percentile",
                               .chooses = keys.clustering_type == "schedule_based",
                               .schedule = std::move(keys.schedule.schedule)});
  }
}

}  // namespace ds::engine::config
