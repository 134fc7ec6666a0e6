#include "dsengine/config_runtime.h"

#include "config/describe.h"

namespace ds::engine::config {

void describe(JsonFields& json, TensorboardSection& s) {
  json.field("enabled", s.enabled);
  json.field("output_path", s.output_path);
  json.field("job_name", s.job_name);
}

void describe(JsonFields& json, WandbSection& s) {
  json.field("enabled", s.enabled);
  json.field("group", s.group);
  json.field("team", s.team);
  json.field("project", s.project);
}

void describe(JsonFields& json, CometSection& s) {
  json.field("enabled", s.enabled);
  json.field("samples_log_interval", s.samples_log_interval);
  json.field("project", s.project);
  json.field("workspace", s.workspace);
  json.field("api_key", s.api_key);
  json.field("experiment_name", s.experiment_name);
  json.field("experiment_key", s.experiment_key);
  json.field("online", s.online);
  json.field("mode", s.mode);
}

}  // namespace ds::engine::config
