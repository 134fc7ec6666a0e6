#include "config/parse_steps.h"

#include <tuple>

#include "config/sections_without_effect.h"
#include "config/split/partition_config.h"
#include "core/check.h"
#include "core/json/json_convert.h"
#include "core/name_pattern.h"
#include "optim/optimizer_table.h"

namespace ds::engine::config {
namespace {

constexpr int64_t kVocabularyMultiple = 8;

void check_precision(const DsConfig& c, JsonProblems& problems) {
  if (c.fp16.enabled && c.bf16.enabled) {
    problems.error("/fp16/enabled",
                   cat("excludes ", problems.place("/bf16/enabled"), ", which is true too; turn one of them off"));
  }
  if (c.data_types.param_dtype && *c.data_types.param_dtype != c.model_dtype()) {
    problems.error("/data_types/param_dtype",
                   cat("expected ", name_of(c.model_dtype()), ", which fp16.enabled and bf16.enabled imply, found ",
                       name_of(*c.data_types.param_dtype)));
  }
  if (c.torch_autocast.enabled && c.zero_optimization.zero_quantized_weights) {
    problems.error("/torch_autocast/enabled",
                   "excludes zero_optimization.zero_quantized_weights; turn one of them off");
  }
  const auto& listed = c.torch_autocast.lower_precision_safe_modules;
  if (!c.torch_autocast.enabled || !listed || listed->empty()) return;
  constexpr const char* kListed = "/torch_autocast/lower_precision_safe_modules";
  if (c.zero_optimization.zero_quantized_gradients) {
    problems.error(kListed,
                   "excludes zero_optimization.zero_quantized_gradients: both say how gradients travel; keep one");
  }
  if (c.gradient_compression.method != CompressionMethod::kNone) {
    problems.error(kListed, cat("excludes gradient_compression.method ", name_of(c.gradient_compression.method),
                                ": both say how gradients travel; keep one"));
  }
}

void check_optimizer(const DsConfig& c, JsonProblems& problems) {
  if (!c.optimizer.given()) return;
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(c.optimizer.type);
  const bool is_tested = row != nullptr && row->tested_with_zero;
  if (c.zero_optimization.stage > 0 && !is_tested && !c.zero_allow_untested_optimizer) {
    problems.error("/optimizer/type", cat(c.optimizer.type, " with zero_optimization.stage ", c.zero_optimization.stage,
                                          " needs \"zero_allow_untested_optimizer\": true; add it, or use stage 0"));
  }
  if (row != nullptr && row->dynamic_scale_only && c.fp16.enabled && c.fp16.loss_scale != 0) {
    problems.error("/fp16/loss_scale",
                   cat("expected 0 (dynamic) with the optimizer ", c.optimizer.type, ", found ", c.fp16.loss_scale));
  }
}

void check_gradients(const DsConfig& c, JsonProblems& problems) {
  const ZeroSection& zero = c.zero_optimization;
  if (c.gradient_allreduce_op == GradientAllreduceOp::kSum) {
    const char* other = zero.stage == 3                            ? "zero_optimization.stage 3"
                        : zero.zenflow                             ? "zero_optimization.zenflow"
                        : without_effect_of(c).compile.deepcompile ? "compile.deepcompile"
                                                                   : nullptr;
    if (other != nullptr) problems.error("/gradient_allreduce_op", cat("\"sum\" excludes ", other, "; use \"mean\""));
  }
  if (!zero.compute_grad_norm && c.gradient_clipping > 0) {
    problems.error("/zero_optimization/compute_grad_norm",
                   cat("false excludes gradient_clipping ", c.gradient_clipping,
                       c.given("gradient_clipping") ? "" : " (its default)", "; set \"gradient_clipping\": 0"));
  }
  if (zero.legacy_stage1) {
    problems.error("/zero_optimization/legacy_stage1", "expected false: this form of stage 1 is gone; remove the key");
  }
  if (!c.managed_gradient_accumulation && zero.stage < 2 && zero.overlap_comm_given && zero.overlap_comm) {
    problems.error("/managed_gradient_accumulation",
                   "false excludes zero_optimization.overlap_comm below stage 2; set overlap_comm to false");
  }
}

// A key of gradient_compression that its method does not read.
void warn_of_unused_compression_keys(const DsConfig& c, JsonProblems& problems) {
  const GradientCompressionSection& s = c.gradient_compression;
  const auto unused = [&](const char* key, bool used) {
    if (used || !c.text["gradient_compression"].contains(key)) return;
    problems.warning(cat("/gradient_compression/", key), cat("means nothing to method \"", name_of(s.method), "\""));
  };
  unused("top_k", s.method == CompressionMethod::kTopK);
  unused("rank", s.method == CompressionMethod::kPowerSgd);
  for (const char* key : {"start_step", "error_feedback", "between_nodes_only"}) unused(key, s.compresses());
}

void check_compression(const DsConfig& c, JsonProblems& problems) {
  const GradientCompressionSection& s = c.gradient_compression;
  if (s.method == CompressionMethod::kNone) return;
  constexpr const char* kMethod = "/gradient_compression/method";
  const std::string found = cat("\"", name_of(s.method), "\" excludes ");
  if (c.zero_optimization.zero_quantized_gradients) {
    problems.error(kMethod,
                   cat(found, "zero_optimization.zero_quantized_gradients; both compress gradients, keep one"));
  }
  if (c.optimizer.compresses()) {
    problems.error(kMethod, cat(found, "optimizer.type ", c.optimizer.type,
                                ", which compresses what ranks exchange itself; keep one of them"));
  }
  if (c.communication_data_type) {
    problems.error(kMethod, cat(found, problems.place("/communication_data_type"),
                                ": the method decides what is sent; remove one of them"));
  }
  warn_of_unused_compression_keys(c, problems);
}

void check_sparse_gradients(const DsConfig& c, JsonProblems& problems) {
  if (!c.sparse_gradients) return;
  const auto excludes = [&](bool asked, const std::string& other, const char* why) {
    if (asked) problems.error("/sparse_gradients", cat("true excludes ", other, ": ", why));
  };
  const std::string zero = "zero_optimization.";
  excludes(c.zero_optimization.stage == 3, zero + "stage 3",
           "tables are whole on no rank there, and are gathered whole before each lookup; use stage 0, 1 or 2");
  excludes(c.zero_optimization.zero_quantized_gradients, zero + "zero_quantized_gradients",
           "both take the place of the same reductions; keep one");
  excludes(c.gradient_compression.compresses(),
           cat("gradient_compression.method ", name_of(c.gradient_compression.method)),
           "both take the place of the same reductions; keep one");
  excludes(c.optimizer.compresses(), cat("optimizer.type ", c.optimizer.type),
           "it compresses what ranks exchange itself; keep one");
}

void check_activations(const DsConfig& c, JsonProblems& problems) {
  const ActivationCheckpointingSection& s = c.activation_checkpointing;
  if (s.modules.empty() && s.recompute != "all") {
    problems.error("/activation_checkpointing/recompute",
                   cat("found \"", s.recompute, "\" without modules: expected activation_checkpointing.modules beside ",
                       "it, which names the modules that it is about; add them or remove it"));
  }
  for (size_t i = 0; i < s.modules.size(); ++i) {
    const std::string reason = regex_problem(s.modules[i]);
    if (reason.empty()) continue;
    problems.error(cat("/activation_checkpointing/modules/", i),
                   cat("expected a regular expression, found \"", s.modules[i], "\" (", reason,
                       "); dots of names are written \\\\. in JSON"));
  }
  const bool copies = s.partition_activations || s.cpu_checkpointing;
  if (s.contiguous_memory_optimization && (!copies || !s.number_checkpoints)) {
    problems.warning("/activation_checkpointing/contiguous_memory_optimization",
                     !copies ? "no effect: it packs the copies of partition_activations and cpu_checkpointing, which "
                               "are both off"
                             : "needs number_checkpoints beside it when layers are checkpointed; add it or turn this "
                               "off");
  }
}

void check_checkpoint(const DsConfig& c, JsonProblems& problems) {
  if (c.checkpoint.use_node_local_storage && c.checkpoint.writer && c.checkpoint.writer->decoupled) {
    problems.error("/checkpoint/use_node_local_storage",
                   "excludes checkpoint.writer.decoupled: hosts tell each other what they have written, which they "
                   "cannot beside training; set one of them to false");
  }
}

void check_metrics(const DsConfig& c, JsonProblems& problems) {
  const MetricsSection& s = c.metrics;
  if (s.mfu && !s.flops_per_sample && !c.flops_profiler.enabled) {
    problems.error("/metrics/mfu",
                   "needs the operations of a sample, found neither metrics.flops_per_sample nor "
                   "\"flops_profiler\": {\"enabled\": true}; add one of them");
  }
  if (s.causal_flops_per_sample && !s.flops_per_sample) {
    problems.error("/metrics/causal_flops_per_sample",
                   "expected metrics.flops_per_sample beside it, found none; give both or neither");
  }
  if (s.causal_flops_per_sample && s.flops_per_sample && *s.causal_flops_per_sample > *s.flops_per_sample) {
    problems.error("/metrics/causal_flops_per_sample",
                   cat("expected at most metrics.flops_per_sample, ", *s.flops_per_sample, ", found ",
                       *s.causal_flops_per_sample));
  }
}

// JSON text that reads as a number. DeepSpeed's pydantic sections take it too; where it reads a key by itself it fails
// with a TypeError, at the start or in the optimizer's first step.
void warn_of_text(const DsConfig& c, JsonProblems& problems) {
  const auto warn = [&problems](const std::string& pointer, const nlohmann::ordered_json& value) {
    double number = 0;
    if (!value.is_string() || !ds::convert(value, number)) return;
    problems.warning(pointer, cat("found text, \"", value.get<std::string>(), "\", read as the number ", number,
                                  "; write it without quotes: DeepSpeed stops at it"));
  };
  for (const char* key :
       {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}) {
    if (c.text.contains(key)) warn(cat("/", key), c.text[key]);
  }
  for (const char* name : {"optimizer", "scheduler"}) {
    const auto section = c.text.find(name);
    if (section == c.text.end() || !section->is_object() || !section->contains("params")) continue;
    const nlohmann::ordered_json& params = (*section)["params"];
    if (!params.is_object()) continue;
    for (const auto& [key, value] : params.items()) warn(cat("/", name, "/params/", key), value);
  }
}

void check_elasticity(const DsConfig& c, JsonProblems& problems) {
  if (!c.elasticity.enabled || c.elasticity.ignore_non_elastic_batch_info) return;
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    if (!c.given(key)) continue;
    problems.error(cat("/", key),
                   "excludes elasticity.enabled, which chooses the batch sizes; remove the key, or set "
                   "elasticity.ignore_non_elastic_batch_info");
  }
}

// Tells whether DeepSpeed would run its CPU Adam; torch's Adam has another update there. Without a type the program
// brings the optimizer.
bool is_cpu_adam(const OptimizerSection& section) {
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(section.type);
  return !section.given() || (row != nullptr && row->is_cpu_adam && !section.values.torch_adam);
}

void check_master_stage(const DsConfig& c, const std::string& pointer, JsonProblems& problems) {
  if (c.zero_optimization.stage == 0) problems.error(pointer, "needs zero_optimization.stage 1, 2 or 3, found 0");
}

// `instead`: what else would do.
void check_master_offload(const DsConfig& c, const std::string& pointer, const char* instead, JsonProblems& problems) {
  if (c.zero_optimization.optimizer_device() == OffloadDevice::kNone) {
    problems.error(pointer,
                   cat("needs zero_optimization.offload_optimizer.device \"cpu\" or \"nvme\", found \"none\"; ",
                       "add the section", instead));
  }
  if (!is_cpu_adam(c.optimizer)) {
    problems.error(pointer, cat("needs optimizer.type Adam or AdamW",
                                c.optimizer.values.torch_adam ? " without optimizer.params.torch_adam: true" : "",
                                ", found ", c.optimizer.type, instead));
  }
}

void check_master_on_device(const DsConfig& c, const std::string& pointer, JsonProblems& problems) {
  if (!c.optimizer.compresses()) return;
  problems.error(pointer,
                 cat("excludes optimizer.type ", c.optimizer.type, ", whose errors of compression are float32 ",
                     "sums with its masters; use another optimizer, or remove the key"));
}

// DeepSpeed refuses these too: masters of 16 bits need stages 1 to 3, offload_optimizer and CPU Adam, but for bf16 with
// states of 16 bits on the device.
void check_masters(const DsConfig& c, JsonProblems& problems) {
  const std::string fp16 = "/fp16/fp16_master_weights_and_grads";
  const std::string bf16 = "/bf16/bf16_master_weights_and_grads";
  if (c.fp16.fp16_master_weights_and_grads) {
    check_master_stage(c, fp16, problems);
    check_master_offload(c, fp16, "", problems);
    if (!c.fp16.enabled) problems.warning(fp16, "means nothing while fp16.enabled is false");
  }
  if (c.bf16.bf16_master_weights_and_grads) {
    check_master_stage(c, bf16, problems);
    if (c.bf16.bf16_optimizer_states && c.zero_optimization.optimizer_device() == OffloadDevice::kNone) {
      check_master_on_device(c, bf16, problems);
    } else {
      check_master_offload(c, bf16, ", or bf16.bf16_optimizer_states: true without offload_optimizer", problems);
    }
    if (!c.bf16.enabled) problems.warning(bf16, "means nothing while bf16.enabled is false");
  }
  if (c.fp16.fp16_master_weights_and_grads && c.bf16.bf16_master_weights_and_grads) {
    problems.error(fp16, "excludes bf16.bf16_master_weights_and_grads; set one of them");
  }
  if (!c.bf16.bf16_optimizer_states) return;
  const std::string states = "/bf16/bf16_optimizer_states";
  if (!c.bf16.bf16_master_weights_and_grads) {
    problems.error(states, "needs bf16.bf16_master_weights_and_grads true, found false");
  }
  check_master_stage(c, states, problems);
}

void check_split_names(const TensorParallelSection& s, JsonProblems& problems) {
  const PartitionConfig partition = read_partition_config(
      s.partition_config,
      [&](const std::string& pointer, const std::string& message) { problems.error(pointer, message); });
  if (partition.tp_size > 1 && partition.tp_size != s.size()) {
    problems.error("/tensor_parallel/partition_config/tp_size",
                   cat("expected ", s.size(), ", which autotp_size and tp_size say, found ", partition.tp_size,
                       "; write tensor_parallel.autotp_size, and remove this key"));
  }
  const nlohmann::ordered_json& names = s.injection_policy_tuple;
  bool all_names = names.is_null() || names.is_array();
  for (const auto& name : names) all_names = all_names && name.is_string();
  if (!all_names) {
    problems.error("/tensor_parallel/injection_policy_tuple",
                   "expected a list of names of layers whose outputs are added, as [\"attention.output.dense\"]");
  }
}

void check_tensor_parallel(const DsConfig& config, JsonProblems& problems) {
  const TensorParallelSection& s = config.tensor_parallel;
  check_split_names(s, problems);
  const auto python_only = [&](bool on, const char* key) {
    if (on) problems.warning(cat("/tensor_parallel/", key), "works in Python only, has no effect here");
  };
  python_only(s.vocab_parallel_ce_backend == "liger", "vocab_parallel_ce_backend");
  python_only(s.keep_module_on_host, "keep_module_on_host");
  python_only(s.replace_with_kernel_inject, "replace_with_kernel_inject");
  const auto without_ranks = [&](bool on, const char* key) {
    if (on && s.size() == 1)
      problems.warning(cat("/tensor_parallel/", key),
                       "has no effect with one rank for a layer; "
                       "set tensor_parallel.autotp_size");
  };
  without_ranks(s.sequence_parallel, "sequence_parallel");
  without_ranks(s.verify, "verify");
  without_ranks(s.tp_overlap_comm, "tp_overlap_comm");
}

void check_sequence_parallel(const DsConfig& config, JsonProblems& problems) {
  const SequenceParallelSection& section = config.sequence_parallel;
  const SequenceParallelSection unused;
  const bool asks =
      section.attention != unused.attention || section.order != unused.order || section.dimension != unused.dimension;
  if (config.sequence_ranks() > 1 || !asks) return;
  problems.warning("/sequence_parallel",
                   "has no effect while one rank has whole sequences; set sequence_parallel_size");
}

void warn_without_effect(const DsConfig& c, JsonProblems& problems) {
  const SectionsWithoutEffect& sections = without_effect_of(c);
  const auto python_only = [&problems](bool on, const char* pointer) {
    if (on) problems.warning(pointer, "works in Python only, has no effect here");
  };
  python_only(sections.wandb.enabled, "/wandb");
  python_only(sections.comet.enabled, "/comet");
  python_only(sections.compile.deepcompile, "/compile");
  python_only(sections.hybrid_engine.enabled, "/hybrid_engine");
  python_only(sections.nebula.enabled, "/nebula");
  python_only(c.disable_python_gc, "/disable_python_gc");
  python_only(!sections.datastates_ckpt.is_null() && sections.datastates_ckpt != false, "/datastates_ckpt");
  if (c.zero_optimization.elastic_checkpoint && c.zero_optimization.stage == 3) {
    problems.warning("/zero_optimization/elastic_checkpoint",
                     "changes nothing: every checkpoint loads into any number of ranks");
  }
  if (sections.weight_quantization) {
    problems.warning("/weight_quantization",
                     "read by DeepSpeed's inference alone; a training run there is the same with it and without it, as "
                     "here");
  }
  if (c.vocabulary_size && *c.vocabulary_size % kVocabularyMultiple != 0) {
    problems.warning("/vocabulary_size", cat(*c.vocabulary_size, " is no multiple of ", kVocabularyMultiple,
                                             ", which costs speed on GPUs"));
  }
}

}  // namespace

void check_across_sections(const DsConfig& config, JsonProblems& problems) {
  check_precision(config, problems);
  check_masters(config, problems);
  check_optimizer(config, problems);
  check_gradients(config, problems);
  check_compression(config, problems);
  check_sparse_gradients(config, problems);
  check_activations(config, problems);
  check_sequence_parallel(config, problems);
  check_checkpoint(config, problems);
  check_metrics(config, problems);
  warn_of_text(config, problems);
  check_elasticity(config, problems);
  check_tensor_parallel(config, problems);
  warn_without_effect(config, problems);
}

}  // namespace ds::engine::config
