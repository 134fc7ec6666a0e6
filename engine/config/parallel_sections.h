// pipeline, tensor_parallel, expert_parallel. Field names and defaults are the keys and defaults of ds_config.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::engine::config {

struct PipelineSection {
  std::optional<int64_t> stages;   // ranks of the pipeline; empty: "auto"
  std::string partition = "best";  // "best": "parameters"
  std::string schedule = "1f1b";   // a kind (pipeline/schedule/schedule.h), or a file of actions
  std::optional<int64_t> chunks;   // stages a rank; empty: "auto", what the schedule needs
  bool seed_layers = false;
  int64_t activation_checkpoint_interval = 0;
  bool pipe_partitioned = true;
  bool grad_partitioned = true;
  bool use_reentrant = true;
};

struct TensorParallelGrid {
  int64_t tp_size = 1;
  int64_t tp_grain_size = 1;
};

struct TensorParallelSection {
  std::string dtype = "fp16";
  int64_t autotp_size = 0;  // 0: off
  bool tp_overlap_comm = false;
  std::optional<bool> vocab_parallel_lm_head;
  std::string vocab_parallel_ce_backend = "torch";
  TensorParallelGrid tensor_parallel;
  nlohmann::ordered_json injection_policy_tuple;  // null or a list of names
  nlohmann::ordered_json partition_config;        // null or an object, as written
  std::optional<std::string> preset_model;
  bool keep_module_on_host = false;
  bool replace_with_kernel_inject = false;
};

struct ExpertParallelSection {
  bool enabled = false;
  int64_t autoep_size = 1;
  int64_t expert_tensor_parallel_size = 1;
  bool validate_folding_routing = false;
  bool async_split_plan = false;
  std::optional<std::string> preset_model;
  std::optional<std::string> moe_layer_pattern;
  std::optional<std::string> expert_pattern;
  std::optional<std::string> router_pattern;
  bool use_grouped_mm = true;
  bool disable_triton_grouped_mm = false;
  std::optional<bool> route_norm;
  double route_scale = 1.0;
  std::string score_apply = "auto";
  std::string combine_impl = "auto";
  std::string row_weighting_impl = "auto";
  std::string gate_up_impl = "separate";
  std::string comm_backend = "comm";
  int64_t comm_num_sm = 12;
  int64_t comm_qp_margin = 4;
  int64_t comm_max_tokens_per_rank = 0;
  std::optional<int64_t> num_expert_groups;
  std::optional<int64_t> num_limited_groups;
  std::string score_func = "auto";
  std::optional<int64_t> top_k;  // empty: "auto"
  std::optional<double> load_balance_coeff;
  std::optional<double> routed_scaling_factor;  // empty: "auto"
  std::optional<std::string> expert_w1;
  std::optional<std::string> expert_w2;
  std::optional<std::string> expert_w3;
  std::optional<std::string> num_experts_attr;
  std::optional<std::string> top_k_attr;
  std::optional<bool> has_shared_experts;
  std::optional<std::string> shared_experts_pattern;
  std::optional<std::string> shared_experts_gate_pattern;
  std::optional<std::string> expert_activation;
};

}  // namespace ds::engine::config
