// compile, hybrid_engine, weight_quantization: sections that rewrite Python models. They are read and checked so that a
// config written for DeepSpeed loads; a warning says that they have no effect here. Also sections that DeepSpeed
// removed and that are not offered (amp, nebula, quantize_training).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

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

struct HybridEngineSection {
  bool enabled = false;
  int64_t max_out_tokens = 512;
  int64_t inference_tp_size = 1;
  bool release_inference_cache = false;
  bool pin_parameters = true;
  int64_t tp_gather_partition_size = 8;
  bool enable_cuda_graph = false;
};

struct WeightQuantizationSection {
  bool enabled = true;
  int64_t num_bits = 8;
  std::string q_type = "symmetric";
  int64_t q_groups = 1;
  nlohmann::ordered_json quantized_initialization = nlohmann::ordered_json::object();
  nlohmann::ordered_json post_init_quant = nlohmann::ordered_json::object();
};

struct NebulaSection {
  bool enabled = false;
  bool enable_nebula_load = true;
  std::optional<std::string> nebula_load_path;
  std::optional<std::string> persistent_storage_path;
  int64_t persistent_time_interval = 100;
  int64_t num_of_version_in_retention = 2;
};

}  // namespace ds::engine::config
