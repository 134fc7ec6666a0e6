#include "engine/config/difficulty_checks.h"

#include <algorithm>
#include <optional>
#include <string>

#include "core/check.h"

namespace ds::engine::config {
namespace {

using efficiency::DifficultySchedule;
using Kind = DifficultySchedule::Kind;

// A value that must be there and positive; 1 after an error.
template <class T>
T positive(JsonFields& json, const std::optional<T>& value, const char* section, const char* key) {
  if (value && *value > 0) return *value;
  json.error(section, cat("expected ", key, ", a number > 0, found ", value ? cat(*value) : "none"));
  return T{1};
}

void read_bounds(JsonFields& json, const std::optional<int64_t>& least, const std::optional<int64_t>& most,
                 DifficultySchedule& out, const char* least_key, const char* most_key) {
  if (!least || *least < 1) {
    json.error(least_key, cat("expected an integer > 0, found ", least ? cat(*least) : "none"));
  } else if (!most || *most < *least) {
    json.error(most_key, cat("expected an integer that is at least ", least_key, " (", *least, "), found ",
                             most ? cat(*most) : "none"));
  } else {
    out.min_difficulty = *least;
    out.max_difficulty = *most;
  }
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
    if (type == "fixed_root") out.root_degree = positive(json, keys.root_degree, section, "root_degree");
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

void read_schedule(JsonFields& json, RandomLtdSection& s) {
  if (!json.reading() || !s.enabled) return;
  const char* const key = "random_ltd_schedule";
  const KeptTokensSection& keys = s.random_ltd_schedule;
  if (keys.schedule_type != "fixed_linear") {
    json.error(key, cat("expected the schedule_type fixed_linear, found \"", keys.schedule_type, '"'));
  }
  const int64_t least = positive(json, keys.min_value, key, "min_value");
  const int64_t most = positive(json, keys.max_value, key, "max_value");
  if (keys.min_value && keys.max_value && most < least) {
    json.error(key, cat("expected a max_value that is at least min_value (", least, "), found ", most));
  }
  if (static_cast<int64_t>(s.random_ltd_layer_id.size()) != s.random_ltd_layer_num) {
    json.error("random_ltd_layer_id", cat("expected as many layers as random_ltd_layer_num says, ",
                                          s.random_ltd_layer_num, ", found ", s.random_ltd_layer_id.size()));
  }
  s.kept = {.kind = Kind::kFixedLinear,
            .min_difficulty = least,
            .max_difficulty = std::max(least, most),
            .total_curriculum_step = positive(json, keys.schedule_config.require_steps, key, "require_steps"),
            .difficulty_step = positive(json, keys.schedule_config.seq_per_step, key, "seq_per_step")};
}

}  // namespace ds::engine::config
