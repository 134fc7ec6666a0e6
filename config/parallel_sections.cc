#include "dsengine/config_zero.h"

#include "config/describe.h"

namespace ds::engine::config {
namespace {

void describe(JsonFields& json, TensorParallelGrid& s) {
  json.field("tp_size", s.tp_size, above(0));
  json.field("tp_grain_size", s.tp_grain_size, above(0));
  for (const char* python_object : {"mpu", "tp_group"}) {
    if (json.keys().has(python_object)) json.warning(python_object, "a Python object, ignored");
    json.keys().declare(python_object);
  }
}

void describe_matching(JsonFields& json, ExpertParallelSection& s) {
  json.field("preset_model", s.preset_model);
  json.field("moe_layer_pattern", s.moe_layer_pattern);
  json.field("expert_pattern", s.expert_pattern);
  json.field("router_pattern", s.router_pattern);
  json.field("expert_w1", s.expert_w1);
  json.field("expert_w2", s.expert_w2);
  json.field("expert_w3", s.expert_w3);
  json.field("num_experts_attr", s.num_experts_attr);
  json.field("top_k_attr", s.top_k_attr);
  json.field("has_shared_experts", s.has_shared_experts);
  json.field("shared_experts_pattern", s.shared_experts_pattern);
  json.field("shared_experts_gate_pattern", s.shared_experts_gate_pattern);
  json.field("expert_activation", s.expert_activation);
}

void describe_routing(JsonFields& json, ExpertParallelSection& s) {
  json.field("route_norm", s.route_norm);
  json.field("route_scale", s.route_scale);
  json.choice("score_apply", s.score_apply, {"auto", "pre", "post"});
  json.choice("combine_impl", s.combine_impl, {"auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"});
  json.choice("row_weighting_impl", s.row_weighting_impl, {"auto", "eager", "fused"});
  json.choice("gate_up_impl", s.gate_up_impl, {"separate", "fused"});
  json.field("num_expert_groups", s.num_expert_groups);
  json.field("num_limited_groups", s.num_limited_groups);
  json.choice("score_func", s.score_func, {"auto", "softmax", "sigmoid"});
  json.field_or_auto("top_k", s.top_k);
  json.field("load_balance_coeff", s.load_balance_coeff);
  json.field_or_auto("routed_scaling_factor", s.routed_scaling_factor);
}

}  // namespace

void describe(JsonFields& json, PipelineSection& s) {
  json.field_or_auto("stages", s.stages, above(0));
  json.field("partition", s.partition);
  json.field("schedule", s.schedule);
  json.field_or_auto("chunks", s.chunks, above(0));
  json.field("seed_layers", s.seed_layers);
  json.field("activation_checkpoint_interval", s.activation_checkpoint_interval, at_least(0));
  json.field("pipe_partitioned", s.pipe_partitioned);
  json.field("grad_partitioned", s.grad_partitioned);
  json.field("use_reentrant", s.use_reentrant);
}

void describe(JsonFields& json, TensorParallelSection& s) {
  json.field("dtype", s.dtype);
  json.field("autotp_size", s.autotp_size, at_least(0));
  json.field("tp_overlap_comm", s.tp_overlap_comm);
  json.field("vocab_parallel_lm_head", s.vocab_parallel_lm_head);
  json.choice("vocab_parallel_ce_backend", s.vocab_parallel_ce_backend, {"torch", "liger"});
  json.section({"tensor_parallel", "tp"}, s.tensor_parallel, describe, UnknownKeys::kRefuse);
  json.field("injection_policy_tuple", s.injection_policy_tuple);
  json.field("partition_config", s.partition_config);
  json.choice("preset_model", s.preset_model, {"llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"});
  json.field("keep_module_on_host", s.keep_module_on_host);
  json.field({"replace_with_kernel_inject", "kernel_inject"}, s.replace_with_kernel_inject);
  json.field("sequence_parallel", s.sequence_parallel);
  json.field("verify", s.verify);
}

void describe(JsonFields& json, SequenceParallelSection& s) {
  json.choice("attention", s.attention, {"auto", "ulysses", "ring"});
  json.choice("order", s.order, {"contiguous", "zigzag"});
  json.field("dimension", s.dimension, at_least(0));
}

void describe(JsonFields& json, ExpertParallelSection& s) {
  json.field("enabled", s.enabled);
  json.field("autoep_size", s.autoep_size, above(0));
  json.field("expert_tensor_parallel_size", s.expert_tensor_parallel_size, above(0));
  json.field("validate_folding_routing", s.validate_folding_routing);
  json.field("async_split_plan", s.async_split_plan);
  json.field("use_grouped_mm", s.use_grouped_mm);
  json.field("disable_triton_grouped_mm", s.disable_triton_grouped_mm);
  json.choice("comm_backend", s.comm_backend, {"comm", "deepep"});
  json.field("comm_num_sm", s.comm_num_sm);
  json.field("comm_qp_margin", s.comm_qp_margin);
  json.field("comm_max_tokens_per_rank", s.comm_max_tokens_per_rank, at_least(0));
  describe_matching(json, s);
  describe_routing(json, s);
}

}  // namespace ds::engine::config
