#include "config/plan/plan_rows.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "config/plan/plan_choices.h"
#include "core/check.h"
#include "optim/optimizer_table.h"
#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/schedule_timing.h"

namespace ds::engine {
namespace {

using config::DsConfig;

// "zero_optimization.stage: 2", with "(default)" where the file does not say it.
std::string reason_of(const DsConfig& config, const char* key, const std::string& value) {
  return cat(key, ": ", value, is_given(config, key) ? "" : " (default)");
}

std::string stage_reason(const DsConfig& config) {
  return reason_of(config, "zero_optimization.stage", cat(config.zero_optimization.stage));
}

const char* yes_no(bool value) { return value ? "true" : "false"; }

std::string precision_text(const DsConfig& config, const Plan& plan) {
  std::string text = name_of(plan.model_dtype);
  if (plan.separate_master) text += cat(" parameters, ", name_of(plan.master_dtype), " master weights");
  if (config.narrow_masters() != nullptr) text += " parameters, gradients and master weights";
  if (plan.state_dtype != plan.master_dtype) text += cat(", optimizer states in ", name_of(plan.state_dtype));
  if (plan.model_dtype == DType::kFloat64) text += " parameters, gradients and optimizer states";
  if (plan.autocast) text += cat(", autocast to ", name_of(*plan.autocast));
  if (plan.buffer_dtype) text += cat(", buffers in ", name_of(*plan.buffer_dtype));
  if (const auto& kept = config.data_types.keep_in_fp32_modules; kept && !kept->empty() && narrows_buffers(plan)) {
    text += ", those that data_types.keep_in_fp32_modules names in fp32";
  }
  if (plan.loss_scaling == LossScaling::kStatic) text += cat(", loss scale ", config.fp16.loss_scale);
  if (plan.loss_scaling == LossScaling::kDynamic) {
    text += cat(", dynamic loss scale from 2^", config.fp16.enabled ? config.fp16.initial_scale_power : 16);
  }
  return text;
}

std::string precision_reason(const DsConfig& config, const Plan& plan) {
  if (plan.model_dtype == DType::kFloat64) return "the model's parameters are float64";
  const std::string masters = config.narrow_masters() != nullptr ? cat(", ", config.narrow_masters(), ": true") : "";
  if (config.fp16.enabled) return reason_of(config, "fp16.enabled", "true") + masters;
  if (config.bf16.enabled) return reason_of(config, "bf16.enabled", "true") + masters;
  if (config.torch_autocast.enabled) return reason_of(config, "torch_autocast.enabled", "true");
  return "neither fp16 nor bf16 enabled";
}

std::string gradients_text(const Plan& plan) {
  if (plan.topology.dp == 1) return cat("one rank, nothing to reduce; kept in ", name_of(plan.gradient_dtype));
  std::string text;
  switch (plan.gradient_policy) {
    case zero::ReductionPolicy::kAllReduce:
      text = "all-reduce at the accumulation boundary";
      break;
    case zero::ReductionPolicy::kReduceScatterAtBoundary:
      text = "reduce-scatter at the accumulation boundary";
      break;
    case zero::ReductionPolicy::kReduceScatterEveryBackward:
      text = "reduce-scatter in every micro-batch, own slice kept";
      break;
  }
  text += plan.overlap_reduction ? ", overlapped with backward" : ", after backward";
  text += cat("; ", plan.average_gradients ? "mean" : "sum", " in ", name_of(plan.communication_dtype));
  if (!plan.sent_in_autocast.empty()) text += cat(", of listed modules in ", name_of(*plan.autocast));
  if (plan.gradient_dtype != plan.communication_dtype) text += cat(", accumulated in ", name_of(plan.gradient_dtype));
  return text;
}

std::string clipping_text(const Plan& plan) {
  if (plan.clip_value > 0) return cat("every element into [-", plan.clip_value, ", ", plan.clip_value, "]");
  if (plan.clip_norm > 0) return cat("global L2 norm to ", plan.clip_norm);
  return "off";
}

std::string non_finite_text(const Plan& plan) {
  if (!plan.compute_grad_norm) return "not looked for";
  switch (plan.non_finite) {
    case config::NonFiniteGradients::kSkip:
      return "the step is skipped";
    case config::NonFiniteGradients::kError:
      return "an error before the update";
    case config::NonFiniteGradients::kAuto:
    case config::NonFiniteGradients::kContinue:
      break;
  }
  return "a warning";
}

// Names the key that decides it, where non_finite_gradients does not.
std::string non_finite_reason(const DsConfig& config, const Plan& plan) {
  if (!plan.compute_grad_norm) return "zero_optimization.compute_grad_norm: false";
  if (config.non_finite_gradients != config::NonFiniteGradients::kAuto) return "non_finite_gradients";
  if (config.fp16.enabled) return "fp16.enabled: true";
  if (config.bf16.enabled) return cat("bf16.check_grad_overflow: ", yes_no(config.bf16.check_grad_overflow));
  return reason_of(config, "non_finite_gradients", "auto");
}

void add_pipeline_row(const DsConfig& config, Plan& plan) {
  if (!plan.pipeline || plan.topology.pipe == 1) return;
  const int64_t chunks = plan.pipeline->chunks;
  std::string text = cat(plan.topology.pipe, " ranks");
  if (chunks > 1) text += cat(" x ", chunks, " stages");
  text += cat(", ", plan.pipeline->schedule, ", ", config.gradient_accumulation_steps, " micro-batches");
  if (!plan.pipeline->own) {
    const pipeline::Schedule schedule =
        pipeline::make_schedule(pipeline::parse_schedule_kind(plan.pipeline->schedule),
                                {.ranks = static_cast<int>(plan.topology.pipe),
                                 .chunks = static_cast<int>(chunks),
                                 .micro_batches = static_cast<int>(config.gradient_accumulation_steps)});
    const double idle = pipeline::simulate(schedule, {pipeline::StageTimes()}).idle();
    text +=
        cat("; ", static_cast<int64_t>(std::lround(100 * idle)), " % of the time idle, if stages take equally long");
  }
  plan.rows.push_back({"pipeline", text, reason_of(config, "pipeline.stages", cat(plan.topology.pipe))});
}

void add_compression_row(const DsConfig& config, Plan& plan) {
  if (!plan.error_feedback) return;
  const config::OptimizerParams& values = config.optimizer.values;
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(plan.optimizer);
  const bool zero_one = row != nullptr && row->last_stage == 0;
  const int64_t freeze = zero_one ? values.var_freeze_step : values.freeze_step;
  std::string text = zero_one ? cat("1 bit an element between variance steps; after step ", freeze,
                                    " ranks step alone and meet every 1 to ", values.local_step_clipper, " steps")
                              : cat("dense until step ", freeze, ", then momenta of 1 bit an element");
  if (plan.partition_optimizer) text += "; weights are gathered as they are";
  plan.rows.push_back(
      {"compression", text, cat("optimizer.params.", zero_one ? "var_freeze_step" : "freeze_step", ": ", freeze)});
}

std::string reductions_text(const Plan& plan) {
  const config::GradientCompressionSection& section = plan.compression;
  const bool all = plan.gradient_policy == zero::ReductionPolicy::kAllReduce;
  std::string text;
  switch (section.method) {
    case config::CompressionMethod::kInt8:
      text = "8-bit integers, one scale for 512 values";
      break;
    case config::CompressionMethod::kTopK:
      text = cat("the largest ", 100 * section.top_k, " % of the elements of ", all ? "a bucket" : "a slice",
                 ", with their positions");
      break;
    case config::CompressionMethod::kPowerSgd:
      text = cat("factors of rank ", section.rank, " of each matrix, the rest dense");
      break;
    case config::CompressionMethod::kSign:
      text = "1 bit an element, one scale for a parameter";
      break;
    case config::CompressionMethod::kNone:
    case config::CompressionMethod::kFloat16:
    case config::CompressionMethod::kBFloat16:
      break;
  }
  if (plan.compression_node_ranks > 1) {
    text += cat("; added as they are on the ", plan.compression_node_ranks, " ranks of a node first");
  }
  if (section.start_step > 0) text += cat("; dense before step ", section.start_step);
  return text +
         (section.error_feedback ? "; what is not sent is added to the next gradient" : "; what is not sent is lost");
}

void add_gradient_compression_row(const DsConfig& config, Plan& plan) {
  const config::GradientCompressionSection& section = config.gradient_compression;
  if (plan.sparse_gradients) {
    plan.rows.push_back({"embeddings", "rows of their gradients that are not zero travel alone where that is less",
                         "sparse_gradients: true"});
  }
  if (!plan.sent_in_autocast.empty()) {
    std::string classes;
    for (const std::string& name : plan.sent_in_autocast) classes += cat(classes.empty() ? "" : ", ", name);
    plan.rows.push_back({"listed modules",
                         cat(classes, ": gradients", plan.gather ? " and gathered parameters" : "", " travel in ",
                             name_of(*plan.autocast)),
                         "torch_autocast.lower_precision_safe_modules"});
  }
  if (!section.compresses()) return;
  if (plan.compression.compresses()) {
    plan.rows.push_back(
        {"reductions", reductions_text(plan), cat("gradient_compression.method: ", name_of(section.method))});
  } else {
    plan.rows.push_back({"gradient_compression", "no effect",
                         plan.shard_ranks == 1 ? "no ranks share slices, or gradients"
                                               : "between_nodes_only, and one node holds all ranks"});
  }
}

PlanRow schedule_row(const DsConfig& config, const PlanFacts& facts, const Plan& plan) {
  const bool in_config = config.scheduler.given();
  if (!facts.given_schedule.empty()) {
    const bool of_torch = facts.given_schedule == ".torch_scheduler";
    return {"lr schedule", of_torch ? "torch's, of the program" : "a function of the program",
            cat("initialize: ", facts.given_schedule, in_config ? ", in place of the config's" : "")};
  }
  if (plan.schedule.empty()) return {"lr schedule", "constant, but for what the program sets", "no scheduler section"};
  const bool plateau = plan.schedule == "ReduceLROnPlateau";
  return {"lr schedule", cat(plan.schedule, plateau ? ", by what the program gives lr_scheduler()->step()" : ""),
          cat("scheduler.type: ", config.scheduler.type)};
}

void add_optimizer_rows(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const std::string where = plan.topology.dp == 1 ? ""
                            : plan.partition_optimizer
                                ? cat(", each rank 1/", plan.shard_ranks,
                                      plan.gather ? " of it" : " of it, then all-gather of the parameters")
                                : ", whole on every rank";
  if (!plan.trains) {
    plan.rows.push_back({"optimizer", "none: forward only, all parameters are frozen", "no optimizer section"});
    return;
  }
  if (!plan.optimizer.empty()) {
    const bool renamed = plan.optimizer != config.optimizer.type;
    plan.rows.push_back({"optimizer", cat(plan.optimizer, " lr ", config.optimizer.values.lr, where),
                         cat("optimizer.type: ", config.optimizer.type, renamed ? " (adam_w_mode: AdamW)" : "")});
  } else {
    plan.rows.push_back(
        {"optimizer", cat("the program's own", facts.client_name.empty() ? "" : ", ", facts.client_name, where),
         config.optimizer.given() ? "initialize: .optimizer, in place of the config's" : "no optimizer section"});
  }
  add_compression_row(config, plan);
  plan.rows.push_back(schedule_row(config, facts, plan));
  add_efficiency_rows(config, plan);
}

void add_gathering_rows(const DsConfig& config, Plan& plan) {
  if (!plan.gather) return;
  const zero::GatherLimits& gather = *plan.gather;
  plan.rows.push_back(
      {"parameters",
       cat("each rank 1/", plan.shard_ranks, " of them, gathered for the operators that use them; ", "of at most ",
           plan.persistent_numel, " elements: whole"),
       reason_of(config, "zero_optimization.stage3_param_persistence_threshold", cat(plan.persistent_numel))});
  plan.rows.push_back({"gathered at once",
                       cat("at most ", gather.max_live, " elements; kept when used again within ",
                           gather.max_reuse_distance, "; ", gather.prefetch, " ahead"),
                       config.zero_optimization.stage3_release_always
                           ? "zero_optimization.stage3_release_always: true, which is slow"
                           : "stage3_max_live_parameters, stage3_max_reuse_distance, stage3_prefetch_bucket_size"});
  if (plan.node_ranks > 1) {
    plan.rows.push_back({"secondary slices",
                         cat("1/", plan.node_ranks, " of what was gathered, from which the ", plan.node_ranks,
                             " ranks of a node gather it again until the next update"),
                         cat("zero_optimization.zero_hpz_partition_size: ", plan.node_ranks)});
  }
}

void add_quantization_rows(Plan& plan) {
  if (plan.weight_bits > 0) {
    plan.rows.push_back({"gathers", "8-bit integers, one scale for 512 values; operators see values of that precision",
                         "zero_optimization.zero_quantized_weights: true"});
  }
  if (plan.frozen_bits > 0) {
    plan.rows.push_back({"frozen parameters", "kept and gathered as 8-bit integers",
                         "zero_optimization.zero_quantized_nontrainable_weights: true"});
  }
  if (plan.gradient_bits > 0) {
    plan.rows.push_back(
        {"reductions",
         cat("4-bit integers, one scale for 512 values",
             plan.gradient_node_ranks > 1 ? cat("; added on the ", plan.gradient_node_ranks, " ranks of a node first")
                                          : ""),
         "zero_optimization.zero_quantized_gradients: true"});
  }
}

const char* place_of(zero::Home home, const char* file) { return home == zero::Home::kFile ? file : "host memory"; }

void add_offload_rows(const DsConfig& config, Plan& plan) {
  const config::ZeroSection& zero = config.zero_optimization;
  const zero::Offload& offload = plan.offload;
  if (offload.optimizer != zero::Home::kDevice) {
    const std::string share = offload.ratio < 1 ? cat("of ", fixed(offload.ratio * 100, 0), " % of the model: ") : "";
    plan.rows.push_back({"offloaded optimizer",
                         cat(share, "master weights and states in ",
                             place_of(offload.optimizer, "a file, read and written around each update"),
                             ", reduced gradients in host memory; the host updates"),
                         cat("zero_optimization.offload_optimizer.device: ", name_of(zero.optimizer_device()))});
  }
  if (offload.delayed) {
    plan.rows.push_back({"delayed update",
                         cat("from step ", plan.delayed_update_start,
                             " on it runs beside the next forward and backward, which read the weights before it"),
                         "zero_optimization.offload_optimizer.delayed_update: true"});
  }
  if (offload.speculative) {
    plan.rows.push_back({"speculative update",
                         cat("the host updates a bucket when its gradient arrives in the last backward, and goes ",
                             "back if the step is then ", plan.clip_norm > 0 ? "clipped or skipped" : "skipped"),
                         "zero_optimization.offload_optimizer.super_offload: true"});
  }
  if (offload.parameters != zero::Home::kDevice) {
    plan.rows.push_back({"offloaded parameters",
                         cat("slices in ", place_of(offload.parameters, "a file"), ", gathered from there",
                             config.aio.use_gds && offload.parameters == zero::Home::kFile
                                 ? ", by cuFile into the device's memory (aio.use_gds)"
                                 : "",
                             plan.separate_master || offload.optimizer != zero::Home::kDevice
                                 ? ""
                                 : "; masters are on the device: offload_optimizer moves them too"),
                         cat("zero_optimization.offload_param.device: ", name_of(zero.param_device()))});
  }
}

void add_sharding_row(Plan& plan) {
  if (plan.shard_ranks == plan.topology.dp) return;
  plan.rows.push_back({"copies",
                       cat(plan.topology.dp / plan.shard_ranks, " of the model state, each on ", plan.shard_ranks,
                           " consecutive ranks; gradients are joined at the accumulation boundary"),
                       cat("zero_optimization.mics_shard_size: ", plan.shard_ranks)});
}

void add_averaging_row(const DsConfig& config, Plan& plan) {
  if (!plan.average_gradients) return;
  if (plan.prescale_gradients) {
    plan.rows.push_back(
        {"averaging", "gradients are divided by the ranks before they are summed", "prescale_gradients: true"});
  } else if (plan.predivide_factor != 1.0) {
    plan.rows.push_back(
        {"averaging",
         cat("gradients are divided by ", plan.predivide_factor, " before they are summed, by the rest after it"),
         cat("gradient_predivide_factor: ", plan.predivide_factor)});
  }
}

// Adds rows on what the section does to regions that the program runs through recompute::checkpoint().
void add_activation_rows(const DsConfig& config, Plan& plan) {
  const config::ActivationCheckpointingSection& section = config.activation_checkpointing;
  const auto add = [&](bool asked, const char* key, const std::string& choice, const char* why) {
    if (asked) plan.rows.push_back({key, choice, why});
  };
  const bool over_axis = section.partition_activations && plan.topology.tensor > 1;
  add(section.cpu_checkpointing, "cpu_checkpointing", "inputs of checkpointed regions are kept on the host",
      "activation_checkpointing.cpu_checkpointing: true; no effect where the device is the CPU");
  add(over_axis, "partition_activations",
      cat("each rank keeps 1/", plan.topology.tensor,
          " of whole inputs of regions that read split parameters, gathered again in backward"),
      "activation_checkpointing.partition_activations: true, over the tensor axis");
  add(section.partition_activations && !over_axis, "partition_activations", "no effect by itself",
      "needs tensor_parallel.autotp_size, or recompute::CheckpointOptions::tensor_parallel_group of the program");
  const bool copies = section.cpu_checkpointing || over_axis;
  constexpr const char* kContiguous = "contiguous_memory_optimization";
  const bool contiguous = section.contiguous_memory_optimization;
  const bool counted = section.number_checkpoints.has_value();
  add(contiguous && !copies, kContiguous, section.partition_activations ? "no effect by itself" : "no effect",
      section.partition_activations
          ? "it packs the copies of partition_activations, see there"
          : "it packs the copies of partition_activations and cpu_checkpointing; without them there are none");
  add(contiguous && copies && !counted, kContiguous, "needs activation_checkpointing.number_checkpoints",
      "without it the first region whose inputs are copied is an error");
  add(contiguous && copies && counted, kContiguous, "copies of inputs in preallocated slots",
      "activation_checkpointing.number_checkpoints of each input");
  add(section.synchronize_checkpoint_boundary, "synchronize_checkpoint_boundary",
      "waits for the device where a checkpointed region begins and ends",
      "activation_checkpointing.synchronize_checkpoint_boundary: true");
  std::string patterns;
  for (const std::string& pattern : section.modules) patterns += cat(patterns.empty() ? "" : ", ", pattern);
  add(!section.modules.empty(), "recomputed modules",
      cat(section.recompute == "all" ? "all of " : "what is pointwise in ", patterns,
          ": dropped in forward, made again in backward"),
      "activation_checkpointing.modules");
  add(section.profile, "checkpoint profile", "counts and times of checkpointed regions, every steps_per_print steps",
      "activation_checkpointing.profile: true");
}

// Numbers that a program draws after initialize() are others than it would get from its own torch::manual_seed().
PlanRow seeds_row(const DsConfig& config, const PlanFacts& facts, int64_t tensor) {
  if (!facts.seeds_generators) return {"seeds", "the program's own", ".seed_generators: false"};
  return {"seeds",
          cat("LibTorch's generators are set to ", config.seed, " + ", tensor > 1 ? "data-parallel " : "", "rank"),
          cat(reason_of(config, "seed", cat(config.seed)), "; .seed_generators = false keeps the program's own")};
}

void add_gradient_rows(const DsConfig& config, Plan& plan) {
  plan.rows.push_back({"gradients", gradients_text(plan), stage_reason(config)});
  add_averaging_row(config, plan);
  add_gradient_compression_row(config, plan);
  plan.rows.push_back(
      {"buckets", cat("at most ", plan.bucket_elements, " elements"),
       reason_of(config, "zero_optimization.reduce_bucket_size", cat(config.zero_optimization.reduce_bucket_size))});
  if (plan.bucket_target_bytes > 0) {
    plan.rows.push_back({"size of buckets",
                         cat("about an eighth of the model, at most ", plan.bucket_target_bytes >> 20, " MiB"),
                         "ranks with accelerators share gradients"});
  }
  if (plan.reduction_patience) {
    plan.rows.push_back({"late reductions",
                         cat("backward waits ", plan.reduction_patience->count(), " ms for other ranks, then goes on"),
                         plan.gather ? "other ranks may wait for this one's next gather"
                                     : "other ranks may wait for this one's sums over the tensor axis"});
  }
  plan.rows.push_back({"clipping", clipping_text(plan),
                       plan.clip_value > 0 ? reason_of(config, "gradient_clip_by_value", cat(plan.clip_value))
                                           : reason_of(config, "gradient_clipping", cat(config.gradient_clipping))});
  plan.rows.push_back({"infinite or NaN", non_finite_text(plan), non_finite_reason(config, plan)});
  if (plan.locate_non_finite) {
    plan.rows.push_back({"local gradients", "looked at before they are added", "locate_non_finite: true"});
  }
}

}  // namespace

void add_rows(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  plan.rows.push_back(
      {"ranks",
       cat(plan.topology.world_size, " (", plan.topology.pipe > 1 ? cat("pipeline ", plan.topology.pipe, " x ") : "",
           "data parallel ", plan.topology.batches(),
           plan.topology.sequence > 1 ? cat(" x sequence ", plan.topology.sequence) : "",
           plan.topology.tensor > 1 ? cat(" x tensor ", plan.topology.tensor) : "", ")"),
       "the launch"});
  plan.rows.push_back({"batch",
                       cat(config.train_batch_size, " = ", config.train_micro_batch_size_per_gpu, " per rank x ",
                           config.gradient_accumulation_steps, " accumulation x ", plan.topology.batches(),
                           plan.topology.tensor * plan.topology.sequence > 1 ? " data-parallel ranks" : " ranks"),
                       config.elastic ? "elasticity" : "train_batch_size and its parts"});
  plan.rows.push_back({"precision", precision_text(config, plan), precision_reason(config, plan)});
  note_casts(facts, plan);
  if (plan.trains) add_gradient_rows(config, plan);
  add_pipeline_row(config, plan);
  add_tensor_rows(config, facts, plan);
  add_optimizer_rows(config, facts, plan);
  add_gathering_rows(config, plan);
  add_quantization_rows(plan);
  add_offload_rows(config, plan);
  add_sharding_row(plan);
  plan.rows.push_back(
      {"communication", name_of(plan.backend), reason_of(config, "communication_backend", name_of(plan.backend))});
  add_comms_log_row(config, plan);
  add_flops_row(config, plan);
  plan.rows.push_back(seeds_row(config, facts, plan.topology.tensor));
  add_alike_rows(config, plan);
  if (config.deterministic) plan.rows.push_back({"deterministic", "same bits on every run", "deterministic: true"});
  note_products(config, plan);
  if (plan.require_all_gradients) {
    plan.rows.push_back({"unused parameters", "an error",
                         cat("zero_optimization.ignore_unused_parameters: ", yes_no(!plan.require_all_gradients))});
  }
  add_activation_rows(config, plan);
  add_rows_without_effect(config, plan);
}

}  // namespace ds::engine
