// Sections of a ds_config that are read and checked and change nothing: Python SDKs (wandb, comet), sections that
// rewrite Python models (compile, hybrid_engine, weight_quantization), and what DeepSpeed removed and nothing here
// takes up (nebula, eigenvalue, amp, ...). A config written for DeepSpeed loads with them; warnings say that they have
// no effect, and unsupported_features() refuses those that would change results.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/config.h"

namespace ds::engine::config {

// wandb
struct WandbSection {
  bool enabled = false;
  std::optional<std::string> group;
  std::optional<std::string> team;
  std::string project = "deepspeed";
};

// comet
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

// compile
struct CompileSection {
  bool deepcompile = false;
  bool autoep_non_moe = false;
  bool free_activation = false;
  int64_t free_activation_threshold = int64_t{10} << 20;  // bytes
  bool offload_activation = false;
  bool offload_activation_pin_memory = true;
  bool offload_opt_states = false;
  bool double_buffer = true;
  bool symmetric_memory = false;
  bool debug_log = false;
  bool offload_parameters = false;
  bool sync_before_reduce = false;
  bool sync_after_reduce = false;
  bool sync_before_allgather = false;
  bool sync_after_allgather = false;
  bool keep_int_input_tensors = true;
  bool keep_all_input_tensors = false;
  std::optional<std::vector<std::string>> passes;
};

// hybrid_engine
struct HybridEngineSection {
  bool enabled = false;
  int64_t max_out_tokens = 512;
  int64_t inference_tp_size = 1;
  bool release_inference_cache = false;
  bool pin_parameters = true;
  int64_t tp_gather_partition_size = 8;
  bool enable_cuda_graph = false;
};

// weight_quantization
struct WeightQuantizationSection {
  bool enabled = true;
  int64_t num_bits = 8;
  std::string q_type = "symmetric";
  int64_t q_groups = 1;
  nlohmann::ordered_json quantized_initialization = nlohmann::ordered_json::object();
  nlohmann::ordered_json post_init_quant = nlohmann::ordered_json::object();
};

// nebula
struct NebulaSection {
  bool enabled = false;
  bool enable_nebula_load = true;
  std::optional<std::string> nebula_load_path;
  std::optional<std::string> persistent_storage_path;
  int64_t persistent_time_interval = 100;
  int64_t num_of_version_in_retention = 2;
};

// eigenvalue
struct EigenvalueSection {
  bool enabled = false;
  bool verbose = false;
  int64_t max_iter = 100;
  double tol = 1e-2;
  double stability = 1e-6;
  int64_t gas_boundary_resolution = 1;
  std::string layer_name = "bert.encoder.layer";
  int64_t layer_num = 0;
};

// What DsConfig::without_effect points to.
struct SectionsWithoutEffect {
  WandbSection wandb;
  CometSection comet;
  CompileSection compile;
  HybridEngineSection hybrid_engine;
  std::optional<WeightQuantizationSection> weight_quantization;
  EigenvalueSection eigenvalue;
  NebulaSection nebula;
  bool graph_harvesting = false;
  nlohmann::ordered_json amp;                // as written; null when absent
  nlohmann::ordered_json quantize_training;  // as written; null when absent
  nlohmann::ordered_json datastates_ckpt;    // as written; null when absent
};

// Returns the sections that the config has; all defaults where it was not parsed.
const SectionsWithoutEffect& without_effect_of(const DsConfig& config);

}  // namespace ds::engine::config
