#include "config/sections_without_effect.h"

#include "config/describe.h"

namespace ds::engine::config {

const SectionsWithoutEffect& without_effect_of(const DsConfig& config) {
  static const SectionsWithoutEffect kDefaults;
  return config.without_effect ? *config.without_effect : kDefaults;
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

void describe(JsonFields& json, CompileSection& s) {
  json.field("deepcompile", s.deepcompile);
  json.field("autoep_non_moe", s.autoep_non_moe);
  json.field("free_activation", s.free_activation);
  json.field("free_activation_threshold", s.free_activation_threshold);
  json.field("offload_activation", s.offload_activation);
  json.field("offload_activation_pin_memory", s.offload_activation_pin_memory);
  json.field("offload_opt_states", s.offload_opt_states);
  json.field("double_buffer", s.double_buffer);
  json.field("symmetric_memory", s.symmetric_memory);
  json.field("debug_log", s.debug_log);
  json.field("offload_parameters", s.offload_parameters);
  json.field("sync_before_reduce", s.sync_before_reduce);
  json.field("sync_after_reduce", s.sync_after_reduce);
  json.field("sync_before_allgather", s.sync_before_allgather);
  json.field("sync_after_allgather", s.sync_after_allgather);
  json.field("keep_int_input_tensors", s.keep_int_input_tensors);
  json.field("keep_all_input_tensors", s.keep_all_input_tensors);
  json.field("passes", s.passes);
}

void describe(JsonFields& json, HybridEngineSection& s) {
  json.field("enabled", s.enabled);
  json.field("max_out_tokens", s.max_out_tokens, above(0));
  json.field("inference_tp_size", s.inference_tp_size, above(0));
  json.field("release_inference_cache", s.release_inference_cache);
  json.field("pin_parameters", s.pin_parameters);
  json.field("tp_gather_partition_size", s.tp_gather_partition_size);
  json.field("enable_cuda_graph", s.enable_cuda_graph);
}

void describe(JsonFields& json, WeightQuantizationSection& s) {
  json.field("enabled", s.enabled);
  json.field("num_bits", s.num_bits);
  json.field("q_type", s.q_type);
  json.field("q_groups", s.q_groups);
  json.field("quantized_initialization", s.quantized_initialization);
  json.field("post_init_quant", s.post_init_quant);
}

void describe(JsonFields& json, EigenvalueSection& s) {
  json.field("enabled", s.enabled);
  json.field("verbose", s.verbose);
  json.field("max_iter", s.max_iter);
  json.field("tol", s.tol);
  json.field("stability", s.stability);
  json.field("gas_boundary_resolution", s.gas_boundary_resolution);
  json.field("layer_name", s.layer_name);
  json.field("layer_num", s.layer_num);
}

void describe(JsonFields& json, NebulaSection& s) {
  json.field("enabled", s.enabled);
  json.field("enable_nebula_load", s.enable_nebula_load);
  json.field("nebula_load_path", s.nebula_load_path);
  json.field("persistent_storage_path", s.persistent_storage_path);
  json.field("persistent_time_interval", s.persistent_time_interval);
  json.field("num_of_version_in_retention", s.num_of_version_in_retention);
}

}  // namespace ds::engine::config
