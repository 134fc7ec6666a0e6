#include "engine/plan.h"

#include <algorithm>

#include "core/check.h"

namespace ds::engine {
namespace {

using config::DsConfig;

constexpr double kMebibyte = 1024.0 * 1024.0;

// "zero_optimization.stage: 2", with "(default)" where the file does not say it.
std::string reason_of(const DsConfig& config, const char* key, const std::string& value) {
  const std::string dotted(key);
  const size_t dot = dotted.find('.');
  const std::string section = dotted.substr(0, dot);
  bool given = config.given(section);
  if (given && dot != std::string::npos) {
    given = config.text[section].is_object() && config.text[section].contains(dotted.substr(dot + 1));
  }
  return cat(key, ": ", value, given ? "" : " (default)");
}

std::string stage_reason(const DsConfig& config) {
  return reason_of(config, "zero_optimization.stage", cat(config.zero_optimization.stage));
}

const char* yes_no(bool value) { return value ? "true" : "false"; }

// What the config says in one place and denies in another.
void require_consistent(const DsConfig& config, const Topology& topology) {
  require<UsageError>(topology.dp > 0 && topology.dp <= topology.world_size,
                      "make_plan: expected 0 < dp <= world_size, found dp ", topology.dp, " and world_size ",
                      topology.world_size);
  require<ConfigError>(config.dp_world_size == topology.dp, "train_batch_size was resolved for ", config.dp_world_size,
                       " data-parallel ranks, found ", topology.dp, "; parse the config for the ranks that run");
  require<ConfigError>(!config.data_parallel_size || *config.data_parallel_size == topology.dp,
                       "data_parallel_size: expected ", topology.dp, ", the ranks that run, found ",
                       config.data_parallel_size.value_or(0), "; remove the key or start ",
                       config.data_parallel_size.value_or(0), " ranks");
  require<ConfigError>(
      config.gradient_clip_by_value == 0 || config.gradient_clipping == 0 || !config.given("gradient_clipping"),
      "gradient_clip_by_value: ", config.gradient_clip_by_value,
      " excludes gradient_clipping: ", config.gradient_clipping,
      " (clipping by norm); keep one, or set the other to 0");
}

void choose_precision(const DsConfig& config, Plan& plan) {
  plan.model_dtype = config.model_dtype();
  plan.gradient_dtype = config.data_types.grad_accum_dtype.value_or(plan.model_dtype);
  plan.communication_dtype = config.communication_data_type.value_or(plan.model_dtype);
  plan.separate_master = plan.model_dtype != DType::kFloat32;
  plan.buffer_dtype = config.data_types.buffer_dtype;
  plan.cast_inputs = config.fp16.enabled && config.fp16.auto_cast;
  if (config.torch_autocast.enabled) plan.autocast = config.torch_autocast.dtype.value_or(DType::kBFloat16);
  if (config.fp16.enabled) {
    plan.loss_scaling = config.fp16.loss_scale == 0 ? LossScaling::kDynamic : LossScaling::kStatic;
  }
  plan.skip_on_overflow = config.fp16.enabled || (config.bf16.enabled && config.bf16.check_grad_overflow);
}

// mics_shard_size: copies of the model state on groups of so many ranks each.
void choose_shards(const config::ZeroSection& zero, Plan& plan) {
  const int64_t dp = plan.topology.dp;
  plan.shard_ranks = dp;
  if (zero.stage == 0 || zero.mics_shard_size <= 0) return;
  require<ConfigError>(dp % zero.mics_shard_size == 0, "zero_optimization.mics_shard_size: expected a divisor of ", dp,
                       ", the data-parallel ranks, found ", zero.mics_shard_size);
  require<ConfigError>(zero.zero_hpz_partition_size <= 1, "zero_optimization.mics_shard_size: ", zero.mics_shard_size,
                       " excludes zero_hpz_partition_size: ", zero.zero_hpz_partition_size,
                       "; both keep copies of parameters close. Keep one of them");
  plan.shard_ranks = zero.mics_shard_size;
}

// zero_hpz_partition_size: ranks of a node. A node of all ranks is the plain case.
void choose_node(const config::ZeroSection& zero, Plan& plan) {
  const int64_t node = zero.zero_hpz_partition_size;
  if (node <= 1 || node == plan.shard_ranks) return;
  require<ConfigError>(plan.shard_ranks % node == 0,
                       "zero_optimization.zero_hpz_partition_size: expected a divisor of ", plan.shard_ranks,
                       ", the ranks that share the parameters, found ", node, "; it is the number of ranks on a node");
  plan.node_ranks = node;
}

void choose_gathering(const config::ZeroSection& zero, Plan& plan) {
  choose_node(zero, plan);
  plan.gather = zero::GatherLimits{.max_live = zero.stage3_max_live_parameters,
                                   .max_reuse_distance = zero.stage3_max_reuse_distance,
                                   .prefetch = zero.stage3_prefetch_bucket_size};
  plan.persistent_numel = zero.stage3_param_persistence_threshold;
  plan.persistent_total = zero.stage3_model_persistence_threshold / plan.shard_ranks;
  // One bucket in use and one on its way fit under the limit. A parameter that is larger has a bucket of its own.
  plan.bucket_elements = std::clamp<int64_t>(zero.stage3_max_live_parameters / 2, 1, plan.bucket_elements);
  if (zero.stage3_allgather_sequential) {
    plan.bucket_elements = 1;
    plan.gather->prefetch = 1;
  }
  if (zero.zero_quantized_weights) plan.weight_bits = 8;
  if (zero.zero_quantized_nontrainable_weights) plan.frozen_bits = 8;
}

// zero_quantized_gradients: a node is what zero_hpz_partition_size says, else a host.
void choose_gradient_quantization(const config::ZeroSection& zero, Plan& plan) {
  if (!zero.zero_quantized_gradients || !plan.partition_optimizer || plan.shard_ranks == 1) return;
  plan.gradient_bits = 4;
  const int64_t node = plan.node_ranks > 1 ? plan.node_ranks : plan.topology.ranks_per_host;
  if (plan.shard_ranks % node == 0) plan.gradient_node_ranks = node;
}

void choose_gradients(const DsConfig& config, Plan& plan) {
  const config::ZeroSection& zero = config.zero_optimization;
  plan.gradient_policy = zero.stage == 0   ? zero::ReductionPolicy::kAllReduce
                         : zero.stage == 1 ? zero::ReductionPolicy::kReduceScatterAtBoundary
                                           : zero::ReductionPolicy::kReduceScatterEveryBackward;
  plan.partition_optimizer = zero.stage > 0;
  plan.overlap_reduction = !zero.overlap_comm_given || zero.overlap_comm;
  plan.average_gradients = config.gradient_allreduce_op == config::GradientAllreduceOp::kMean;
  plan.prescale_gradients = config.prescale_gradients;
  plan.predivide_factor = config.gradient_predivide_factor;
  const int64_t limit =
      zero.stage == 0 ? zero.reduce_bucket_size : std::min(zero.reduce_bucket_size, zero.allgather_bucket_size);
  plan.bucket_elements = std::max<int64_t>(limit, 1);  // 0: every parameter by itself
  choose_shards(zero, plan);
  if (zero.stage == 3 && plan.shard_ranks > 1) choose_gathering(zero, plan);
  choose_gradient_quantization(zero, plan);
  plan.require_all_gradients = !zero.ignore_unused_parameters;
  plan.clip_value = config.gradient_clip_by_value;
  plan.clip_norm = plan.clip_value > 0 && !config.given("gradient_clipping") ? 0.0 : config.gradient_clipping;
  // A skipped step is decided by the norm.
  plan.compute_grad_norm = zero.compute_grad_norm || plan.skip_on_overflow;
}

std::string precision_text(const DsConfig& config, const Plan& plan) {
  std::string text = name_of(plan.model_dtype);
  if (plan.separate_master) text += " parameters, fp32 master weights";
  if (plan.autocast) text += cat(", autocast to ", name_of(*plan.autocast));
  if (plan.buffer_dtype) text += cat(", buffers in ", name_of(*plan.buffer_dtype));
  if (plan.loss_scaling == LossScaling::kStatic) text += cat(", loss scale ", config.fp16.loss_scale);
  if (plan.loss_scaling == LossScaling::kDynamic) {
    text += cat(", dynamic loss scale from 2^", config.fp16.initial_scale_power);
  }
  return text;
}

std::string precision_reason(const DsConfig& config) {
  if (config.fp16.enabled) return reason_of(config, "fp16.enabled", "true");
  if (config.bf16.enabled) return reason_of(config, "bf16.enabled", "true");
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
  if (plan.gradient_dtype != plan.communication_dtype) text += cat(", accumulated in ", name_of(plan.gradient_dtype));
  return text;
}

std::string clipping_text(const Plan& plan) {
  if (plan.clip_value > 0) return cat("every element into [-", plan.clip_value, ", ", plan.clip_value, "]");
  if (plan.clip_norm > 0) return cat("global L2 norm to ", plan.clip_norm);
  return "off";
}

void add_optimizer_rows(const DsConfig& config, Plan& plan) {
  const std::string where = plan.topology.dp == 1 ? ""
                            : plan.partition_optimizer
                                ? cat(", each rank 1/", plan.shard_ranks,
                                      plan.gather ? " of it" : " of it, then all-gather of the parameters")
                                : ", whole on every rank";
  if (!plan.optimizer.empty()) {
    const bool renamed = plan.optimizer != config.optimizer.type;
    plan.rows.push_back({"optimizer", cat(plan.optimizer, " lr ", config.optimizer.values.lr, where),
                         cat("optimizer.type: ", config.optimizer.type, renamed ? " (adam_w_mode: AdamW)" : "")});
  } else {
    plan.rows.push_back(
        {"optimizer", cat("the program's own", where),
         config.optimizer.given() ? "initialize: .optimizer, in place of the config's" : "no optimizer section"});
  }
  plan.rows.push_back(
      {"lr schedule", plan.schedule.empty() ? "constant, or the program's own" : plan.schedule,
       config.scheduler.given() ? cat("scheduler.type: ", config.scheduler.type) : "no scheduler section"});
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
                       "stage3_max_live_parameters, stage3_max_reuse_distance, stage3_prefetch_bucket_size"});
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

void add_sharding_row(Plan& plan) {
  if (plan.shard_ranks == plan.topology.dp) return;
  plan.rows.push_back({"copies",
                       cat(plan.topology.dp / plan.shard_ranks, " of the model state, each on ", plan.shard_ranks,
                           " consecutive ranks; gradients are joined at the accumulation boundary"),
                       cat("zero_optimization.mics_shard_size: ", plan.shard_ranks)});
}

// What the section does to regions that the program runs through offload::checkpoint().
void add_activation_rows(const DsConfig& config, Plan& plan) {
  const config::ActivationCheckpointingSection& section = config.activation_checkpointing;
  const auto add = [&](bool asked, const char* key, const char* choice, const char* why) {
    if (asked) plan.rows.push_back({key, choice, why});
  };
  add(section.cpu_checkpointing, "cpu_checkpointing", "inputs of checkpointed regions are kept on the host",
      "activation_checkpointing.cpu_checkpointing: true; no effect where the device is the CPU");
  add(section.partition_activations, "partition_activations", "no effect by itself",
      "needs offload::CheckpointOptions::tensor_parallel_group, which the program sets");
  add(section.contiguous_memory_optimization && !section.cpu_checkpointing, "contiguous_memory_optimization",
      "no effect", "it packs the copies of partition_activations and cpu_checkpointing; without them there are none");
  add(section.contiguous_memory_optimization && section.cpu_checkpointing, "contiguous_memory_optimization",
      "host copies of inputs in preallocated slots", "activation_checkpointing.number_checkpoints of each input");
  add(section.synchronize_checkpoint_boundary, "synchronize_checkpoint_boundary",
      "waits for the device where a checkpointed region begins and ends",
      "activation_checkpointing.synchronize_checkpoint_boundary: true");
  add(section.profile, "checkpoint profile", "counts and times of checkpointed regions, every steps_per_print steps",
      "activation_checkpointing.profile: true");
}

// Keys that change how DeepSpeed moves data and that this layout has no use for.
void add_rows_without_effect(const DsConfig& config, Plan& plan) {
  const config::ZeroSection& zero = config.zero_optimization;
  const auto moot = [&](bool asked, const char* key, const char* why) {
    if (asked) plan.rows.push_back({key, "no effect", why});
  };
  moot(zero.round_robin_gradients, "round_robin_gradients", "every bucket is divided evenly among the ranks already");
  moot(zero.parameter_alignment, "parameter_alignment", "parameters start at multiples of 64 bytes already");
  moot(!zero.contiguous_gradients, "contiguous_gradients", "gradients are always views of their bucket");
  moot(zero.stage > 0 && !zero.reduce_scatter, "reduce_scatter", "each rank receives its slice only; same sums");
  const auto& section = config.text.contains("zero_optimization") ? config.text["zero_optimization"] : config.text;
  moot(zero.stage == 3 && section.is_object() && section.contains("sub_group_size"), "sub_group_size",
       "the optimizer goes bucket by bucket already");
  moot(zero.stage == 3 && zero.stage3_module_granularity_threshold > 0, "stage3_module_granularity_threshold",
       "small modules share a bucket, which is gathered as one, already");
  moot(zero.stage == 3 && zero.stage3_use_all_reduce_for_fetch_params, "stage3_use_all_reduce_for_fetch_params",
       "slices are gathered in place; an all-reduce would send twice as much");
  moot(zero.stage > 0 && !zero.allgather_partitions, "allgather_partitions", "slices are always all-gathered");
  moot(zero.stage == 0 && zero.mics_shard_size > 0, "mics_shard_size", "stage 0 partitions nothing");
  moot(zero.zero_hpz_partition_size > 1 && !plan.gather, "zero_hpz_partition_size", "parameters are whole already");
  moot(zero.zero_hpz_partition_size > 1 && plan.gather && plan.node_ranks == 1, "zero_hpz_partition_size",
       "a node holds all ranks that share the parameters");
  moot(zero.zero_quantized_weights && !plan.gather, "zero_quantized_weights", "parameters are whole already");
  moot(zero.zero_quantized_nontrainable_weights && !plan.gather, "zero_quantized_nontrainable_weights",
       "parameters are whole already");
  moot(zero.zero_quantized_gradients && plan.gradient_bits == 0, "zero_quantized_gradients",
       plan.partition_optimizer ? "no ranks share slices; copies are joined as they are"
                                : "stage 0 reduces whole buckets by all-reduce");
  moot(zero.mics_hierarchical_params_gather, "mics_hierarchical_params_gather",
       "collectives go through shared memory inside a host and between hosts once already");
}

void add_rows(const DsConfig& config, Plan& plan) {
  plan.rows.push_back(
      {"ranks", cat(plan.topology.world_size, " (data parallel ", plan.topology.dp, ")"), "the launch"});
  plan.rows.push_back({"batch",
                       cat(config.train_batch_size, " = ", config.train_micro_batch_size_per_gpu, " per rank x ",
                           config.gradient_accumulation_steps, " accumulation x ", plan.topology.dp, " ranks"),
                       "train_batch_size and its parts"});
  plan.rows.push_back({"precision", precision_text(config, plan), precision_reason(config)});
  plan.rows.push_back({"gradients", gradients_text(plan), stage_reason(config)});
  plan.rows.push_back(
      {"buckets", cat("at most ", plan.bucket_elements, " elements"),
       reason_of(config, "zero_optimization.reduce_bucket_size", cat(config.zero_optimization.reduce_bucket_size))});
  plan.rows.push_back({"clipping", clipping_text(plan),
                       plan.clip_value > 0 ? reason_of(config, "gradient_clip_by_value", cat(plan.clip_value))
                                           : reason_of(config, "gradient_clipping", cat(config.gradient_clipping))});
  add_optimizer_rows(config, plan);
  add_gathering_rows(config, plan);
  add_quantization_rows(plan);
  add_sharding_row(plan);
  plan.rows.push_back(
      {"communication", name_of(plan.backend), reason_of(config, "communication_backend", name_of(plan.backend))});
  if (config.deterministic) plan.rows.push_back({"deterministic", "same bits on every run", "deterministic: true"});
  if (plan.require_all_gradients) {
    plan.rows.push_back({"unused parameters", "an error",
                         cat("zero_optimization.ignore_unused_parameters: ", yes_no(!plan.require_all_gradients))});
  }
  add_activation_rows(config, plan);
  add_rows_without_effect(config, plan);
}

// Bytes of optimizer state per trainable element. Muon: of a matrix; the rest of the model has AdamW's.
int64_t optimizer_state_bytes(const std::string& type, const config::OptimizerParams& params) {
  constexpr int64_t kMoment = 4;  // float32
  if (type == "Adam" || type == "AdamW") return (params.amsgrad ? 3 : 2) * kMoment;
  if (type == "Lamb") return 2 * kMoment;
  if (type == "Adagrad" || type == "Lion" || type == "Muon") return kMoment;
  if (type == "SGD") return params.momentum != 0 ? kMoment : 0;
  return 0;
}

}  // namespace

zero::MemoryQuestion memory_question(const DsConfig& config, const Plan& plan, int64_t parameters) {
  return {.stage = static_cast<int>(config.zero_optimization.stage),
          .dp = plan.shard_ranks,
          .copies = plan.topology.dp / plan.shard_ranks,
          .node_ranks = plan.node_ranks,
          .parameters = parameters,
          .bucket_limit = plan.bucket_elements,
          .parameter_bytes = bytes_of(plan.model_dtype),
          .gradient_bytes = bytes_of(plan.gradient_dtype),
          .communication_bytes = bytes_of(plan.communication_dtype),
          .separate_master = plan.separate_master,
          .optimizer_state_bytes = optimizer_state_bytes(plan.optimizer, config.optimizer.values),
          .weight_bits = plan.weight_bits,
          .gradient_bits = plan.gradient_bits,
          .gradient_node_ranks = plan.gradient_node_ranks,
          .accumulation_steps = config.gradient_accumulation_steps,
          .gather = plan.gather};
}

Plan make_plan(const DsConfig& config, const Topology& topology, const PlanFacts& facts) {
  config::require_supported(config);
  require_consistent(config, topology);
  Plan plan;
  plan.topology = topology;
  choose_precision(config, plan);
  choose_gradients(config, plan);
  if (!facts.client_optimizer) plan.optimizer = config.optimizer.algorithm();
  plan.schedule = config.scheduler.type;
  plan.backend = config.communication_backend;
  plan.parameters = facts.parameters;
  plan.activation_bytes = facts.activation_bytes;
  if (plan.parameters) {
    const zero::MemoryQuestion question = memory_question(config, plan, *plan.parameters);
    plan.bytes = zero::predict_model_state(question);
    plan.step_bytes = zero::predict_step(question);
  }
  add_rows(config, plan);
  return plan;
}

std::string to_table(const Plan& plan) {
  std::vector<PlanRow> rows = plan.rows;
  if (plan.bytes) {
    const zero::ModelStateBytes& bytes = *plan.bytes;
    const auto mebibytes = [](int64_t value) { return fixed(static_cast<double>(value) / kMebibyte, 1); };
    rows.push_back({"model state",
                    cat(mebibytes(bytes.total()), " MiB per rank: parameters ", mebibytes(bytes.parameters),
                        ", gradients ", mebibytes(bytes.gradients), ", master ", mebibytes(bytes.master),
                        ", optimizer ", mebibytes(bytes.optimizer)),
                    cat("predicted for ", plan.parameters.value_or(0), " trainable elements")});
    const int64_t most = bytes.total() + plan.step_bytes.gathered + plan.step_bytes.secondary + plan.activation_bytes;
    if (most > bytes.total()) {
      rows.push_back(
          {"in a step",
           cat("about ", mebibytes(most), " MiB per rank: gathered parameters at most ",
               mebibytes(plan.step_bytes.gathered),
               plan.step_bytes.secondary > 0 ? cat(", secondary slices ", mebibytes(plan.step_bytes.secondary)) : "",
               plan.activation_bytes > 0 ? cat(", activations ", mebibytes(plan.activation_bytes)) : "", " on top"),
           plan.activation_bytes > 0 ? "predicted" : "predicted, without activations"});
    }
  }
  size_t what_width = 0;
  size_t choice_width = 0;
  for (const PlanRow& row : rows) {
    what_width = std::max(what_width, row.what.size());
    choice_width = std::max(choice_width, row.choice.size());
  }
  constexpr size_t kWidestChoice = 84;  // longer ones push their reason out of the column
  choice_width = std::min(choice_width, kWidestChoice);
  std::string table;
  for (const PlanRow& row : rows) {
    const size_t gap = choice_width > row.choice.size() ? choice_width - row.choice.size() : 0;
    table += cat(table.empty() ? "" : "\n", "  ", row.what, std::string(what_width - row.what.size() + 2, ' '),
                 row.choice, std::string(gap + 2, ' '), row.reason);
  }
  return table;
}

}  // namespace ds::engine
