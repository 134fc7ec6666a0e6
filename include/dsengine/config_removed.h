// Sections that DeepSpeed dropped in 0.19.8, with the keys and defaults of 0.19.6.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

struct ProgressiveLayerDropSection {
  bool enabled = false;
  double theta = 1.0;
  double gamma = 0.001;
};

struct CurriculumLearningSection {  // the top-level one
  bool enabled = false;
  std::string curriculum_type = "seqlen";
  std::optional<int64_t> min_difficulty;
  std::optional<int64_t> max_difficulty;
  std::optional<std::string> schedule_type;  // fixed_linear, fixed_root, fixed_discrete, custom
  nlohmann::ordered_json schedule_config = nlohmann::ordered_json::object();
};

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

struct SparseAttentionSection {
  std::string mode = "fixed";  // dense, fixed, variable, bigbird, bslongformer
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

struct CompressionTrainingSection {
  LayerReductionSection layer_reduction;
  CompressionMethodSection weight_quantization;
  CompressionMethodSection activation_quantization;
  CompressionMethodSection sparse_pruning;
  CompressionMethodSection row_pruning;
  CompressionMethodSection head_pruning;
  CompressionMethodSection channel_pruning;
};

}  // namespace ds::engine::config
