// Sections that DeepSpeed dropped in 0.19.8, with the keys and defaults of 0.19.6; and sections that rewrite Python
// models (compile, hybrid_engine, weight_quantization), which are read and checked so that a config written for
// DeepSpeed loads; a warning says that they have no effect here. Also sections that DeepSpeed removed and that are not
// offered (amp, nebula, quantize_training), and autotuning, which is not there yet.
//
// Plain values that the ds_config owns; safe from any thread; nothing throws. Torch-free.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/difficulty_schedule.h"

namespace ds::engine::config {

// progressive_layer_drop
struct ProgressiveLayerDropSection {
  bool enabled = false;
  double theta = 1.0;
  double gamma = 0.001;
};

// schedule_config of a curriculum
struct DifficultySection {
  std::optional<int64_t> total_curriculum_step;
  std::optional<int64_t> difficulty_step;
  std::optional<double> root_degree;
  std::optional<std::vector<int64_t>> difficulty;
  std::optional<std::vector<int64_t>> max_step;
};

// curriculum_learning, the top-level one
struct CurriculumLearningSection {
  bool enabled = false;
  std::string curriculum_type = "seqlen";
  std::optional<int64_t> min_difficulty;
  std::optional<int64_t> max_difficulty;
  std::optional<std::string> schedule_type;  // fixed_linear, fixed_root, fixed_discrete, custom
  DifficultySection schedule_config;
  efficiency::DifficultySchedule schedule;  // that these keys give, where it is enabled
};

// elasticity
struct ElasticitySection {
  bool enabled = false;
  std::optional<int64_t> max_train_batch_size;
  std::optional<std::vector<int64_t>> micro_batch_sizes;
  int64_t min_gpus = 1;
  int64_t max_gpus = 10000;
  int64_t num_gpus_per_node = 1;
  int64_t model_parallel_size = 1;
  int64_t min_time = 0;
  bool prefer_larger_batch = true;
  bool ignore_non_elastic_batch_info = false;
  double version = 0.2;
};

// sparse_attention
struct SparseAttentionSection {
  std::string mode = "fixed";  // dense, fixed, variable, bigbird, bslongformer; ours: sliding_window
  int64_t block = 16;
  bool different_layout_per_head = false;
  int64_t num_local_blocks = 4;
  int64_t num_global_blocks = 1;
  std::string attention = "bidirectional";
  bool horizontal_global_attention = false;
  int64_t num_different_global_patterns = 1;
  int64_t num_random_blocks = 0;
  std::vector<int64_t> local_window_blocks = {4};
  std::vector<int64_t> global_block_indices = {0};
  std::optional<std::vector<int64_t>> global_block_end_indices;
  int64_t num_sliding_window_blocks = 3;
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

// compression_training.layer_reduction
struct LayerReductionSection {
  bool enabled = false;
  std::optional<int64_t> keep_number_layer;
  std::optional<std::string> module_name_prefix;
  std::vector<int64_t> teacher_layer;
  std::vector<std::string> other_module_name;
};

// One method of compression_training: {"shared_parameters", "different_groups"}, as written.
struct CompressionMethodSection {
  bool enabled = false;  // shared_parameters.enabled
  nlohmann::ordered_json shared_parameters = nlohmann::ordered_json::object();
  nlohmann::ordered_json different_groups = nlohmann::ordered_json::object();
};

// compression_training
struct CompressionTrainingSection {
  LayerReductionSection layer_reduction;
  CompressionMethodSection weight_quantization;
  CompressionMethodSection activation_quantization;
  CompressionMethodSection sparse_pruning;
  CompressionMethodSection row_pruning;
  CompressionMethodSection head_pruning;
  CompressionMethodSection channel_pruning;
};

// What elasticity comes to. Sizes count data-parallel ranks.
struct ElasticBatch {
  int64_t train = 0;           // global batch, the same for all valid sizes
  std::vector<int64_t> valid;  // sizes, ascending; may be empty
  int64_t micro = 0;           // of the asked size
  int64_t accumulation = 0;    // of the asked size
  int64_t train_of_valid = 0;  // what `valid` share; not `train` when the asked size is not among them (0.2)
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

// autotuning.model_info
struct ModelInfoSection {
  bool profile = false;
  std::optional<int64_t> num_params;
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> num_layers;
};

// autotuning
struct AutotuningSection {
  bool enabled = false;
  bool fast = true;
  std::string results_dir = "autotuning_results";
  std::string exps_dir = "autotuning_exps";
  bool overwrite = true;
  int64_t start_profile_step = 3;
  int64_t end_profile_step = 5;
  std::string metric = "throughput";
  std::optional<std::string> metric_path;
  std::string tuner_type = "gridsearch";
  int64_t tuner_early_stopping = 5;
  int64_t tuner_num_trials = 50;
  nlohmann::ordered_json arg_mappings;  // null or an object, as written
  std::optional<int64_t> max_train_batch_size;
  int64_t min_train_batch_size = 1;
  int64_t max_train_micro_batch_size_per_gpu = 1024;
  int64_t min_train_micro_batch_size_per_gpu = 1;
  int64_t num_tuning_micro_batch_sizes = 3;
  int64_t mp_size = 1;
  std::optional<std::string> model_info_path;
  ModelInfoSection model_info;
};

}  // namespace ds::engine::config
