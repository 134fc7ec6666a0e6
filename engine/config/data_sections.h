// data_efficiency and autotuning. Field names and defaults are the keys and defaults of ds_config.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

struct CurriculumSection {  // data_efficiency.data_sampling.curriculum_learning
  bool enabled = false;
  std::optional<std::string> data_cluster_path;
  nlohmann::ordered_json curriculum_metrics;  // {name: {...}}, as written
};

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

struct DataSamplingSection {
  bool enabled = false;
  int64_t num_epochs = 1000;
  int64_t num_workers = 0;
  bool pin_memory = false;
  CurriculumSection curriculum_learning;
  DynamicBatchingSection dynamic_batching;
};

struct LayerTokenLrScheduleSection {
  bool enabled = false;
};

struct RandomLtdSection {
  bool enabled = false;
  int64_t total_layer_num = 0;
  int64_t random_ltd_layer_num = 0;
  std::vector<int64_t> random_ltd_layer_id;
  std::optional<std::string> model_mask_name;
  std::string model_type = "decoder";
  std::string hidden_state_order = "batch_seq_dim";
  nlohmann::ordered_json random_ltd_schedule;  // as written
  LayerTokenLrScheduleSection layer_token_lr_schedule;
};

struct DataRoutingSection {
  bool enabled = false;
  RandomLtdSection random_ltd;
};

struct DataEfficiencySection {
  bool enabled = false;
  int64_t seed = 1234;
  DataSamplingSection data_sampling;
  DataRoutingSection data_routing;
};

struct ModelInfoSection {
  bool profile = false;
  std::optional<int64_t> num_params;
  std::optional<int64_t> hidden_size;
  std::optional<int64_t> num_layers;
};

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
