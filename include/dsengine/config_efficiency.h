// Sections of a ds_config about leaving out work: data_efficiency, the curriculum_learning of the top level,
// progressive_layer_drop, sparse_attention and compression_training. Field names and defaults are the keys and defaults
// of ds_config; configs/README.md explains each. DeepSpeed removed all but data_efficiency in 0.19.8; their spelling is
// that of 0.19.6.
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

// data_efficiency.data_sampling.curriculum_learning
struct CurriculumSection {
  bool enabled = false;
  std::optional<std::string> data_cluster_path;
  nlohmann::ordered_json curriculum_metrics;      // {name: {...}}, as written
  std::vector<efficiency::SampleMetric> metrics;  // these metrics, parsed; empty unless enabled
};

// data_efficiency.data_sampling.dynamic_batching
struct DynamicBatchingSection {
  bool enabled = false;
  std::optional<std::string> metrics_path;
  std::string lr_scaling_method = "linear";
  int64_t min_batch_size = 1;
  std::optional<int64_t> max_batch_size;
  std::string sequence_picking_order = "dataloader";
  std::optional<int64_t> max_tokens;
  bool verbose = false;
};

// data_efficiency.data_sampling
struct DataSamplingSection {
  bool enabled = false;
  int64_t num_epochs = 1000;
  int64_t num_workers = 0;
  bool pin_memory = false;
  CurriculumSection curriculum_learning;
  DynamicBatchingSection dynamic_batching;
};

// data_efficiency.data_routing.random_ltd.layer_token_lr_schedule
struct LayerTokenLrScheduleSection {
  bool enabled = false;
};

// data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config
struct KeptTokensStepsSection {
  std::optional<int64_t> require_steps;
  std::optional<int64_t> seq_per_step;
};

// data_efficiency.data_routing.random_ltd.random_ltd_schedule
struct KeptTokensSection {
  std::optional<int64_t> min_value;
  std::optional<int64_t> max_value;
  std::string schedule_type = "fixed_linear";
  KeptTokensStepsSection schedule_config;
};

// data_efficiency.data_routing.random_ltd
struct RandomLtdSection {
  bool enabled = false;
  int64_t total_layer_num = 0;
  int64_t random_ltd_layer_num = 0;
  std::vector<int64_t> random_ltd_layer_id;
  std::optional<std::string> model_mask_name;
  std::string model_type = "decoder";
  std::string hidden_state_order = "batch_seq_dim";
  KeptTokensSection random_ltd_schedule;
  efficiency::DifficultySchedule kept;  // the schedule that these keys give, where it is enabled
  LayerTokenLrScheduleSection layer_token_lr_schedule;
};

// data_efficiency.data_routing
struct DataRoutingSection {
  bool enabled = false;
  RandomLtdSection random_ltd;
};

// data_efficiency
struct DataEfficiencySection {
  bool enabled = false;
  int64_t seed = 1234;
  DataSamplingSection data_sampling;
  DataRoutingSection data_routing;

  // Whether a curriculum chooses samples, with the sections around it.
  bool chooses_samples() const { return enabled && data_sampling.enabled && data_sampling.curriculum_learning.enabled; }
  // Whether random-LTD is on, with the sections around it.
  bool drops_tokens() const { return enabled && data_routing.enabled && data_routing.random_ltd.enabled; }
};

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
  efficiency::DifficultySchedule schedule;  // the schedule that these keys give, where it is enabled
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

}  // namespace ds::engine::config
