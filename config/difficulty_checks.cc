#include "config/difficulty_checks.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "core/check.h"

namespace ds::engine::config {
namespace {

using efficiency::DifficultySchedule;
using Kind = DifficultySchedule::Kind;

constexpr int64_t kMost = int64_t{1} << 40;  // of steps and difficulties: their sums and products are numbers

// A value that must be there and positive; 1 after an error.
int64_t positive(JsonFields& json, const std::optional<int64_t>& value, const char* section, const char* key) {
  if (value && *value > 0 && *value <= kMost) return *value;
  json.error(section, cat("expected ", key, ", an integer from 1 to 2^40, found ", value ? cat(*value) : "none"));
  return 1;
}

void read_bounds(JsonFields& json, const std::optional<int64_t>& least, const std::optional<int64_t>& most,
                 DifficultySchedule& out, const char* least_key, const char* most_key) {
  if (!least || *least < 1) {
    json.error(least_key, cat("expected an integer > 0, found ", least ? cat(*least) : "none"));
  } else if (!most || *most < *least || *most > kMost) {
    json.error(most_key, cat("expected an integer that is at least ", least_key, " (", *least,
                             ") and at most 2^40, found ", most ? cat(*most) : "none"));
  } else {
    out.min_difficulty = *least;
    out.max_difficulty = *most;
  }
}

double root_degree_of(JsonFields& json, const DifficultySection& keys) {
  constexpr double kLeast = 0.01;
  if (keys.root_degree && *keys.root_degree >= kLeast) return *keys.root_degree;
  json.error("schedule_config", cat("expected root_degree, a number from ", kLeast, " on, found ",
                                    keys.root_degree ? cat(*keys.root_degree) : "none"));
  return 1;
}

void read_list(JsonFields& json, const DifficultySection& s, DifficultySchedule& out) {
  const char* const key = "schedule_config";
  if (!s.difficulty || s.difficulty->empty() || !s.max_step) {
    json.error(key, "expected difficulty and max_step, lists of integers, for schedule_type \"fixed_discrete\"");
  } else if (s.difficulty->size() != s.max_step->size() + 1) {
    json.error(key, cat("expected one more difficulty than max_step, whose last has no end, found ",
                        s.difficulty->size(), " and ", s.max_step->size()));
  } else {
    for (size_t i = 1; i < s.max_step->size(); ++i) {
      if ((*s.max_step)[i] > (*s.max_step)[i - 1]) continue;
      json.error(key,
                 cat("expected a max_step that grows, found ", (*s.max_step)[i - 1], " before ", (*s.max_step)[i]));
      return;
    }
    for (const int64_t difficulty : *s.difficulty) {
      if (difficulty > 0) continue;
      json.error(key, cat("expected difficulties > 0, found ", difficulty));
      return;
    }
    out.difficulty = *s.difficulty;
    out.max_step = *s.max_step;
  }
}

void check_layers(JsonFields& json, const RandomLtdSection& s) {
  const char* const key = "data_routing.random_ltd.random_ltd_layer_id";
  if (static_cast<int64_t>(s.random_ltd_layer_id.size()) != s.random_ltd_layer_num) {
    json.error(key, cat("expected as many layers as random_ltd_layer_num says, ", s.random_ltd_layer_num, ", found ",
                        s.random_ltd_layer_id.size()));
  }
  std::set<int64_t> seen;
  for (const int64_t layer : s.random_ltd_layer_id) {
    const bool is_layer = layer >= 0 && (s.total_layer_num <= 0 || layer < s.total_layer_num);
    if (is_layer && seen.insert(layer).second) continue;
    json.error(key, cat("expected each layer once, counted from 0",
                        s.total_layer_num > 0 ? cat(", below total_layer_num (", s.total_layer_num, ")") : "",
                        ", found ", layer, is_layer ? " twice" : ""));
  }
}

}  // namespace

void read_schedule(JsonFields& json, CurriculumLearningSection& s) {
  if (!json.reading() || !s.enabled) return;
  DifficultySchedule& out = s.schedule;
  const std::string type = s.schedule_type.value_or("");
  read_bounds(json, s.min_difficulty, s.max_difficulty, out, "min_difficulty", "max_difficulty");
  if (type == "fixed_linear" || type == "fixed_root") {
    out.kind = type == "fixed_root" ? Kind::kFixedRoot : Kind::kFixedLinear;
    const DifficultySection& keys = s.schedule_config;
    const char* const section = "schedule_config";
    out.total_curriculum_step = positive(json, keys.total_curriculum_step, section, "total_curriculum_step");
    out.difficulty_step = positive(json, keys.difficulty_step, section, "difficulty_step");
    if (type == "fixed_root") out.root_degree = root_degree_of(json, keys);
  } else if (type == "fixed_discrete") {
    out.kind = Kind::kFixedDiscrete;
    read_list(json, s.schedule_config, out);
  } else if (type == "custom") {
    out.kind = Kind::kCustom;
  } else {
    json.error("schedule_type", cat("expected fixed_linear, fixed_root, fixed_discrete or custom, found ",
                                    type.empty() ? "none" : cat('"', type, '"')));
  }
}

void read_schedule(JsonFields& json, DataEfficiencySection& data) {
  RandomLtdSection& s = data.data_routing.random_ltd;
  if (!json.reading() || !data.enabled || !data.data_routing.enabled || !s.enabled) return;
  const char* const key = "data_routing.random_ltd.random_ltd_schedule";
  const KeptTokensSection& keys = s.random_ltd_schedule;
  if (keys.schedule_type != "fixed_linear") {
    json.error(key, cat("expected the schedule_type fixed_linear, found \"", keys.schedule_type, '"'));
  }
  const int64_t least = positive(json, keys.min_value, key, "min_value");
  const int64_t most = positive(json, keys.max_value, key, "max_value");
  if (keys.min_value && keys.max_value && most < least) {
    json.error(key, cat("expected a max_value that is at least min_value (", least, "), found ", most));
  }
  check_layers(json, s);
  s.kept = {.kind = Kind::kFixedLinear,
            .min_difficulty = least,
            .max_difficulty = std::max(least, most),
            .total_curriculum_step = positive(json, keys.schedule_config.require_steps, key, "require_steps"),
            .difficulty_step = positive(json, keys.schedule_config.seq_per_step, key, "seq_per_step")};
}

}  // namespace ds::engine::config
