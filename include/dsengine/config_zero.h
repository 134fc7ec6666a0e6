// Sections of a ds_config about what is spread over ranks and memories: zero_optimization with its sub-sections,
// pipeline, tensor_parallel and expert_parallel. Field names and defaults are the keys and defaults of ds_config; sizes
// are in elements unless said otherwise. configs/README.md explains each key.
//
// Plain values that the ds_config owns; safe from any thread; nothing throws. Torch-free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ds::pipeline {
struct Schedule;
}

namespace ds::engine::config {

enum class OffloadDevice { kNone, kCpu, kNvme };  // "none", "cpu", "nvme"

// Returns the spelling that the key has in a ds_config.
const char* name_of(OffloadDevice device);

// zero_optimization.offload_param
struct OffloadParamSection {
  OffloadDevice device = OffloadDevice::kNone;
  std::optional<std::string> nvme_path;
  int64_t buffer_count = 5;
  int64_t buffer_size = 100'000'000;
  int64_t max_in_cpu = 1'000'000'000;
  bool pin_memory = true;
};

// zero_optimization.offload_optimizer
struct OffloadOptimizerSection {
  OffloadDevice device = OffloadDevice::kNone;
  std::optional<std::string> nvme_path;
  int64_t buffer_count = 4;
  bool pin_memory = true;
  bool pipeline_read = false;
  bool pipeline_write = false;
  bool fast_init = false;
  double ratio = 1.0;
  bool super_offload = false;
  double cpuadam_cores_perc = 0.8;
  bool delayed_update = false;        // own key: the update of a step runs beside the next forward and backward
  int64_t delayed_update_start = 40;  // own key: with the first optimizer step, counted from 1, that is delayed
};

// zero_optimization.zenflow
struct ZenFlowSection {
  double topk_ratio = 0.1;
  std::string select_strategy = "auto";    // auto, step, epoch
  std::optional<int64_t> select_interval;  // empty: "auto"
  std::optional<int64_t> update_interval;  // empty: "auto"
  bool overlap_step = false;
  bool offload = false;
  double auto_ratio = 0.99;
  int64_t full_warm_up_rounds = 0;
  double pt_reserved_cores_perc = 0.5;
  std::optional<int64_t> steps_per_epoch;
};

// Modules gathered whole at stage 3.
struct LeafModuleSection {
  std::vector<std::string> classes;
  std::vector<std::string> names;
  std::vector<std::string> name_suffixes;
};

// zero_optimization.zeropp_loco_param
struct LocoParamSection {
  double err_beta = 0.8;
  int64_t reset_T = 1024;  // NOLINT(readability-identifier-naming): spelled as the key
};

// zero_optimization
struct ZeroSection {
  int64_t stage = 0;
  bool contiguous_gradients = true;
  bool reduce_scatter = true;
  int64_t reduce_bucket_size = 500'000'000;
  bool use_multi_rank_bucket_allreduce = true;
  bool allgather_partitions = true;
  int64_t allgather_bucket_size = 500'000'000;
  bool overlap_comm = false;        // default: true at stage 3
  bool overlap_comm_given = false;  // not a key: whether the file says so
  bool compute_grad_norm = true;
  bool load_from_fp32_weights = true;
  bool elastic_checkpoint = false;
  std::optional<OffloadParamSection> offload_param;
  std::optional<OffloadOptimizerSection> offload_optimizer;
  std::optional<ZenFlowSection> zenflow;
  int64_t sub_group_size = 1'000'000'000;
  int64_t stage3_prefetch_bucket_size = 50'000'000;
  int64_t stage3_param_persistence_threshold = 100'000;
  int64_t stage3_model_persistence_threshold = std::numeric_limits<int64_t>::max();
  int64_t stage3_max_live_parameters = 1'000'000'000;
  int64_t stage3_max_reuse_distance = 1'000'000'000;
  bool stage3_gather_16bit_weights_on_model_save = false;
  int64_t stage3_module_granularity_threshold = 0;
  bool stage3_use_all_reduce_for_fetch_params = false;
  bool stage3_allgather_sequential = false;
  bool stage3_release_always = false;  // ours: as a model that is too large for a rank, at any size
  bool ignore_unused_parameters = true;
  bool legacy_stage1 = false;
  bool round_robin_gradients = false;
  bool parameter_alignment = false;
  int64_t zero_hpz_partition_size = 1;
  bool zero_quantized_weights = false;
  bool zero_quantized_nontrainable_weights = false;
  bool zero_quantized_gradients = false;
  bool memory_efficient_linear = true;
  bool pipeline_loading_checkpoint = false;
  bool override_module_apply = true;
  bool log_trace_cache_warnings = false;
  bool enable_sanity_checks = false;
  bool save_muon_momentum_buffer_in_memory = false;
  LeafModuleSection leaf_module;
  // Removed from DeepSpeed in 0.19.8; the spelling of 0.19.6.
  int64_t mics_shard_size = -1;
  bool mics_hierarchical_params_gather = false;
  std::optional<LocoParamSection> zeropp_loco_param;

  // kNone without the section.
  OffloadDevice optimizer_device() const {
    return offload_optimizer ? offload_optimizer->device : OffloadDevice::kNone;
  }
  OffloadDevice param_device() const { return offload_param ? offload_param->device : OffloadDevice::kNone; }
};

// pipeline
struct PipelineSection {
  std::optional<int64_t> stages;   // ranks of the pipeline; empty: "auto"
  std::string partition = "best";  // "best": "parameters"
  std::string schedule = "1f1b";   // a kind, or a file of actions (docs/pipeline.md)
  // The actions of that file, which parse() has read; null where `schedule` names a kind.
  std::shared_ptr<const pipeline::Schedule> own_schedule;
  std::optional<int64_t> chunks;  // stages a rank; empty: "auto", what the schedule needs
  bool seed_layers = false;
  int64_t activation_checkpoint_interval = 0;
  bool pipe_partitioned = true;
  bool grad_partitioned = true;
  bool use_reentrant = true;
};

// tensor_parallel.tensor_parallel
struct TensorParallelGrid {
  int64_t tp_size = 1;
  int64_t tp_grain_size = 1;
};

// tensor_parallel
struct TensorParallelSection {
  std::string dtype = "fp16";
  int64_t autotp_size = 0;  // 0, 1: off. After parse(): the ranks of the tensor axis, whatever says them
  bool tp_overlap_comm = false;
  std::optional<bool> vocab_parallel_lm_head;
  std::string vocab_parallel_ce_backend = "torch";
  TensorParallelGrid tensor_parallel;
  nlohmann::ordered_json injection_policy_tuple;  // null or a list of names
  nlohmann::ordered_json partition_config;        // null or an object, as written
  std::optional<std::string> preset_model;
  bool keep_module_on_host = false;
  bool replace_with_kernel_inject = false;
  bool sequence_parallel = false;  // own key: between layers, activations are cut along the sequence (Megatron-SP)
  bool verify = false;             // own key: what is computed of parts is computed of wholes too, and compared

  // Ranks that share a layer; 1: the axis is not used.
  int64_t size() const { return std::max({autotp_size, tensor_parallel.tp_size, int64_t{1}}); }
};

// sequence_parallel, own section: how batches of sequences are cut over sequence_parallel_size ranks
// (dsengine/sequence_parallel.h).
struct SequenceParallelSection {
  std::string attention = "auto";    // "ulysses", "ring"; "auto": ulysses where the heads divide, else ring
  std::string order = "contiguous";  // or "zigzag": the same causal work on every rank of a ring
  int64_t dimension = 1;             // of a batch: its positions
};

// expert_parallel
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
