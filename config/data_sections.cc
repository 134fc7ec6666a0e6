#include "dsengine/config_efficiency.h"

#include <limits>

#include "config/describe.h"
#include "config/difficulty_checks.h"

namespace ds::engine::config {
namespace {

void describe(JsonFields& json, CurriculumSection& s) {
  json.field("enabled", s.enabled);
  json.field("data_cluster_path", s.data_cluster_path);
  json.field("curriculum_metrics", s.curriculum_metrics);
  if (!json.reading() || !s.enabled) return;
  if (!s.curriculum_metrics.is_object() || s.curriculum_metrics.empty()) {
    json.error("curriculum_metrics",
               "expected an object, one entry for each metric, since curriculum_learning is enabled");
    return;
  }
  json.section("curriculum_metrics", s, describe_sample_metrics, UnknownKeys::kWarn);
}

void describe(JsonFields& json, DynamicBatchingSection& s) {
  json.field("enabled", s.enabled);
  json.field("metrics_path", s.metrics_path);
  json.choice("lr_scaling_method", s.lr_scaling_method, {"linear", "sqrt", "none"});
  json.field("min_batch_size", s.min_batch_size, above(0));
  json.field("max_batch_size", s.max_batch_size);
  json.choice("sequence_picking_order", s.sequence_picking_order, {"dataloader", "random", "seqlen"});
  json.field("max_tokens", s.max_tokens, above(0));
  json.field("verbose", s.verbose);
  if (json.reading() && s.enabled && !s.max_tokens) {
    json.error("max_tokens", "expected an integer > 0, since dynamic_batching is enabled");
  }
}

void describe(JsonFields& json, DataSamplingSection& s) {
  json.field("enabled", s.enabled);
  json.field("num_epochs", s.num_epochs);
  json.field("num_workers", s.num_workers, between(0, std::numeric_limits<int>::max()));
  json.field("pin_memory", s.pin_memory);
  json.section("curriculum_learning", s.curriculum_learning, describe, UnknownKeys::kWarn);
  json.section("dynamic_batching", s.dynamic_batching, describe, UnknownKeys::kWarn);
}

void describe(JsonFields& json, LayerTokenLrScheduleSection& s) { json.field("enabled", s.enabled); }

void describe(JsonFields& json, KeptTokensStepsSection& s) {
  json.field("require_steps", s.require_steps);
  json.field("seq_per_step", s.seq_per_step);
}

void describe(JsonFields& json, KeptTokensSection& s) {
  json.field("min_value", s.min_value);
  json.field("max_value", s.max_value);
  json.field("schedule_type", s.schedule_type);
  json.section("schedule_config", s.schedule_config, describe, UnknownKeys::kWarn);
}

void describe(JsonFields& json, RandomLtdSection& s) {
  json.field("enabled", s.enabled);
  json.field("total_layer_num", s.total_layer_num);
  json.field("random_ltd_layer_num", s.random_ltd_layer_num);
  json.field("random_ltd_layer_id", s.random_ltd_layer_id);
  json.field("model_mask_name", s.model_mask_name);
  json.choice("model_type", s.model_type, {"decoder", "encoder"});
  json.choice("hidden_state_order", s.hidden_state_order, {"batch_seq_dim", "seq_batch_dim"});
  json.section("random_ltd_schedule", s.random_ltd_schedule, describe, UnknownKeys::kWarn);
  json.section("layer_token_lr_schedule", s.layer_token_lr_schedule, describe, UnknownKeys::kRefuseNearly);
}

void describe(JsonFields& json, DataRoutingSection& s) {
  json.field("enabled", s.enabled);
  json.section("random_ltd", s.random_ltd, describe, UnknownKeys::kWarn);
}

void describe(JsonFields& json, ModelInfoSection& s) {
  json.field("profile", s.profile);
  json.field("num_params", s.num_params);
  json.field("hidden_size", s.hidden_size);
  json.field("num_layers", s.num_layers);
}

}  // namespace

void describe(JsonFields& json, DataEfficiencySection& s) {
  json.field("enabled", s.enabled);
  json.field("seed", s.seed);
  json.section("data_sampling", s.data_sampling, describe, UnknownKeys::kWarn);
  json.section("data_routing", s.data_routing, describe, UnknownKeys::kWarn);
  read_schedule(json, s);
}

void describe(JsonFields& json, AutotuningSection& s) {
  json.field("enabled", s.enabled);
  json.field("fast", s.fast);
  json.field("results_dir", s.results_dir);
  json.field("exps_dir", s.exps_dir);
  json.field("overwrite", s.overwrite);
  json.field("start_profile_step", s.start_profile_step);
  json.field("end_profile_step", s.end_profile_step);
  json.field("metric", s.metric);
  json.field("metric_path", s.metric_path);
  json.field("tuner_type", s.tuner_type);
  json.field("tuner_early_stopping", s.tuner_early_stopping);
  json.field("tuner_num_trials", s.tuner_num_trials);
  json.field("arg_mappings", s.arg_mappings);
  json.field("max_train_batch_size", s.max_train_batch_size);
  json.field("min_train_batch_size", s.min_train_batch_size);
  json.field("max_train_micro_batch_size_per_gpu", s.max_train_micro_batch_size_per_gpu);
  json.field("min_train_micro_batch_size_per_gpu", s.min_train_micro_batch_size_per_gpu);
  json.field("num_tuning_micro_batch_sizes", s.num_tuning_micro_batch_sizes);
  json.field("mp_size", s.mp_size);
  json.field("model_info_path", s.model_info_path);
  json.section("model_info", s.model_info, describe, UnknownKeys::kWarn);
}

}  // namespace ds::engine::config
