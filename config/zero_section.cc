// The keys of zero_optimization: names and checks. Their defaults are in the structs of dsengine/config_zero.h, and
// config/plan decides with them: reduce_bucket_size limits buckets there, which zero/partition.cc cuts.
#include "dsengine/config_zero.h"

#include "config/describe.h"
#include "core/check.h"

namespace ds::engine::config {
namespace {

const JsonFields::Names<OffloadDevice>& device_names() {
  static const JsonFields::Names<OffloadDevice> kNames = {
      {"none", OffloadDevice::kNone}, {"cpu", OffloadDevice::kCpu}, {"nvme", OffloadDevice::kNvme}};
  return kNames;
}

void describe(JsonFields& json, OffloadParamSection& s) {
  json.enumerator("device", s.device, device_names());
  json.field("nvme_path", s.nvme_path);
  json.field("buffer_count", s.buffer_count, at_least(0));
  json.field("buffer_size", s.buffer_size, at_least(0));
  json.field("max_in_cpu", s.max_in_cpu, at_least(0));
  json.field("pin_memory", s.pin_memory);
}

void describe(JsonFields& json, OffloadOptimizerSection& s) {
  json.enumerator("device", s.device, device_names());
  json.field("nvme_path", s.nvme_path);
  json.field("buffer_count", s.buffer_count, at_least(0));
  json.field("pin_memory", s.pin_memory);
  json.field("pipeline_read", s.pipeline_read);
  json.field("pipeline_write", s.pipeline_write);
  json.field("fast_init", s.fast_init);
  json.field("ratio", s.ratio, between(0, 1));
  json.field("super_offload", s.super_offload);
  json.field("cpuadam_cores_perc", s.cpuadam_cores_perc, between(0, 1));
  json.field("delayed_update", s.delayed_update);
  json.field("delayed_update_start", s.delayed_update_start, at_least(1));
}

void describe(JsonFields& json, ZenFlowSection& s) {
  json.field("topk_ratio", s.topk_ratio, inside(0, 1));
  json.choice("select_strategy", s.select_strategy, {"auto", "step", "epoch"});
  json.field_or_auto("select_interval", s.select_interval, at_least(1));
  json.field_or_auto("update_interval", s.update_interval, at_least(1));
  json.field("overlap_step", s.overlap_step);
  json.field("offload", s.offload);
  json.field("auto_ratio", s.auto_ratio, between(0, 1));
  json.field("full_warm_up_rounds", s.full_warm_up_rounds);
  json.field("pt_reserved_cores_perc", s.pt_reserved_cores_perc, between(0, 1));
  json.field("steps_per_epoch", s.steps_per_epoch);
}

// A list of names, or one name.
void names_field(JsonFields& json, const char* key, std::vector<std::string>& out) {
  const nlohmann::ordered_json* value = json.find(key);
  if (value != nullptr && value->is_string()) {
    out = {value->get<std::string>()};
  } else {
    json.field(key, out);
  }
}

void describe(JsonFields& json, LeafModuleSection& s) {
  names_field(json, "classes", s.classes);
  names_field(json, "names", s.names);
  names_field(json, "name_suffixes", s.name_suffixes);
}

void describe(JsonFields& json, LocoParamSection& s) {
  json.field("err_beta", s.err_beta);
  json.field("reset_T", s.reset_T);
}

void describe_buckets(JsonFields& json, ZeroSection& s) {
  json.field("contiguous_gradients", s.contiguous_gradients);
  json.field("reduce_scatter", s.reduce_scatter);
  json.field("reduce_bucket_size", s.reduce_bucket_size, at_least(0));
  json.field("use_multi_rank_bucket_allreduce", s.use_multi_rank_bucket_allreduce);
  json.field("allgather_partitions", s.allgather_partitions);
  json.field("allgather_bucket_size", s.allgather_bucket_size, at_least(0));
  json.field("compute_grad_norm", s.compute_grad_norm);
  json.field("load_from_fp32_weights", s.load_from_fp32_weights);
  json.field("elastic_checkpoint", s.elastic_checkpoint);
  json.field("ignore_unused_parameters", s.ignore_unused_parameters);
  json.field("legacy_stage1", s.legacy_stage1);
  json.field("round_robin_gradients", s.round_robin_gradients);
  json.field("parameter_alignment", s.parameter_alignment);
  json.field("enable_sanity_checks", s.enable_sanity_checks);
}

void describe_stage3(JsonFields& json, ZeroSection& s) {
  json.field("sub_group_size", s.sub_group_size, at_least(0));
  json.field({"stage3_prefetch_bucket_size", "prefetch_bucket_size"}, s.stage3_prefetch_bucket_size, at_least(0));
  json.field({"stage3_param_persistence_threshold", "param_persistence_threshold"},
             s.stage3_param_persistence_threshold, at_least(0));
  json.field({"stage3_model_persistence_threshold", "model_persistence_threshold"},
             s.stage3_model_persistence_threshold, at_least(0));
  json.field({"stage3_max_live_parameters", "max_live_parameters"}, s.stage3_max_live_parameters, at_least(0));
  json.field({"stage3_max_reuse_distance", "max_reuse_distance"}, s.stage3_max_reuse_distance, at_least(0));
  json.field({"stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"},
             s.stage3_gather_16bit_weights_on_model_save);
  json.field({"stage3_module_granularity_threshold", "module_granularity_threshold"},
             s.stage3_module_granularity_threshold);
  json.field({"stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params"},
             s.stage3_use_all_reduce_for_fetch_params);
  json.field({"stage3_allgather_sequential", "allgather_sequential"}, s.stage3_allgather_sequential);
  json.field("stage3_release_always", s.stage3_release_always);
  json.field("zero_hpz_partition_size", s.zero_hpz_partition_size, at_least(0));
  json.field("zero_quantized_weights", s.zero_quantized_weights);
  json.field("zero_quantized_nontrainable_weights", s.zero_quantized_nontrainable_weights);
  json.field("zero_quantized_gradients", s.zero_quantized_gradients);
  json.field("memory_efficient_linear", s.memory_efficient_linear);
  json.field("pipeline_loading_checkpoint", s.pipeline_loading_checkpoint);
  json.field("override_module_apply", s.override_module_apply);
  json.field("log_trace_cache_warnings", s.log_trace_cache_warnings);
  json.field("save_muon_momentum_buffer_in_memory", s.save_muon_momentum_buffer_in_memory);
  json.section("leaf_module", s.leaf_module, describe, UnknownKeys::kRefuse);
  json.field("mics_shard_size", s.mics_shard_size);
  json.field("mics_hierarchical_params_gather", s.mics_hierarchical_params_gather);
  json.section("zeropp_loco_param", s.zeropp_loco_param, describe, UnknownKeys::kRefuse);
}

// A deprecated switch; whether it is on. Its replacement beside it is an error.
bool deprecated_switch(JsonFields& json, const char* key, const char* replacement) {
  std::optional<bool> on;
  json.field(key, on);
  if (!json.keys().has(key) || !on) return false;
  if (*replacement == '\0') {
    json.warning(key, "deprecated, has no effect; remove it");
  } else if (json.keys().has(replacement)) {
    json.error(key, cat("is deprecated and excludes its replacement \"", replacement,
                        "\", which is given too; remove \"", key, "\""));
  } else {
    json.warning(key, cat("deprecated; use \"", replacement, "\""));
  }
  return *on;
}

void read_deprecated(JsonFields& json, ZeroSection& s) {
  if (!json.reading()) return;
  if (deprecated_switch(json, "cpu_offload", "offload_optimizer") && !s.offload_optimizer) {
    s.offload_optimizer = OffloadOptimizerSection{.device = OffloadDevice::kCpu};
  }
  if (deprecated_switch(json, "cpu_offload_param", "offload_param") && !s.offload_param) {
    s.offload_param = OffloadParamSection{.device = OffloadDevice::kCpu};
  }
  deprecated_switch(json, "cpu_offload_use_pin_memory", "");
  if (deprecated_switch(json, "stage3_gather_fp16_weights_on_model_save",
                        "stage3_gather_16bit_weights_on_model_save")) {
    s.stage3_gather_16bit_weights_on_model_save = true;
  }
}

void check(JsonFields& json, const ZeroSection& s) {
  if (!s.compute_grad_norm && s.stage != 1 && s.stage != 2) {
    json.error("compute_grad_norm", cat("false needs stage 1 or 2, found stage ", s.stage, "; remove it or set stage"));
  }
  const auto needs_path = [&](const char* key, OffloadDevice device, const std::optional<std::string>& path) {
    if (device == OffloadDevice::kNvme && path.value_or("").empty()) {
      json.error(key,
                 "device \"nvme\" needs nvme_path, a folder on a local disk (\"auto\" is one that the program gives, "
                 "AutoValues::nvme_path); add it, or use \"cpu\"");
    }
  };
  if (s.offload_optimizer) needs_path("offload_optimizer", s.optimizer_device(), s.offload_optimizer->nvme_path);
  if (s.offload_param) needs_path("offload_param", s.param_device(), s.offload_param->nvme_path);
}

}  // namespace

const char* name_of(OffloadDevice device) {
  for (const auto& [name, value] : device_names()) {
    if (value == device) return name.c_str();
  }
  throw InternalError("unknown OffloadDevice");
}

void describe(JsonFields& json, ZeroSection& s) {
  json.field("stage", s.stage, between(0, 3));
  s.overlap_comm = json.reading() ? s.stage == 3 : s.overlap_comm;
  s.overlap_comm_given = s.overlap_comm_given || json.keys().has("overlap_comm");
  std::optional<bool> overlap = s.overlap_comm;
  json.field("overlap_comm", overlap);
  s.overlap_comm = overlap.value_or(s.stage == 3);
  describe_buckets(json, s);
  json.section("offload_param", s.offload_param, describe, UnknownKeys::kRefuse);
  json.section("offload_optimizer", s.offload_optimizer, describe, UnknownKeys::kRefuse);
  json.section("zenflow", s.zenflow, describe, UnknownKeys::kRefuse);
  describe_stage3(json, s);
  read_deprecated(json, s);
  if (json.reading()) check(json, s);
}

void describe_zero_optimization(JsonFields& json, DsConfig& config) {
  const nlohmann::ordered_json* value = json.find("zero_optimization");
  if (value == nullptr || !value->is_boolean()) {
    if (json.keys().has("allgather_size"))
      json.warning("allgather_size", "means something beside \"zero_optimization\": true only, ignored");
    json.keys().declare("allgather_size");
    return json.section("zero_optimization", config.zero_optimization, describe, UnknownKeys::kRefuse);
  }
  json.warning("zero_optimization", cat("deprecated form; write {\"stage\": ", value->get<bool>() ? 1 : 0, "}"));
  config.zero_optimization.stage = value->get<bool>() ? 1 : 0;
  json.field("allgather_size", config.zero_optimization.allgather_bucket_size, at_least(0));
}

}  // namespace ds::engine::config
