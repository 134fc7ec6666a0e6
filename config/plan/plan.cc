#include "config/plan/plan.h"

#include <algorithm>

#include "config/plan/plan_choices.h"
#include "config/plan/plan_rows.h"
#include "config/supported.h"
#include "core/check.h"
#include "core/text.h"
#include "optim/optimizer_table.h"
#include "pipeline/schedule/schedule.h"

namespace ds::engine {
namespace {

using config::DsConfig;
using optimizers::find_optimizer;
using optimizers::OptimizerDescription;

// Refuses what the config says in one place and denies in another.
void require_consistent(const DsConfig& config, const Topology& topology) {
  require<UsageError>(topology.dp > 0 && topology.dp <= topology.world_size,
                      "make_plan: expected 0 < dp <= world_size, found dp ", topology.dp, " and world_size ",
                      topology.world_size);
  require<UsageError>(topology.pipe * topology.dp * topology.tensor == topology.world_size,
                      "make_plan: expected pipe x dp x tensor = world_size, ", "found ", topology.pipe, " x ",
                      topology.dp, " x ", topology.tensor, " and ", topology.world_size);
  require<ConfigError>(config.tensor_parallel.size() == topology.tensor, "tensor_parallel.autotp_size: expected ",
                       topology.tensor, ", the ranks that share a layer here, found ", config.tensor_parallel.size(),
                       "; change the key, or the arrangement of the ranks");
  require<ConfigError>(config.sequence_ranks() == topology.sequence && topology.dp % topology.sequence == 0,
                       "sequence_parallel_size: expected ", topology.sequence, ", the ranks that share a batch here, ",
                       "found ", config.sequence_ranks(), "; change the key, or the arrangement of the ranks");
  const int64_t batches = topology.batches();
  require<ConfigError>(config.dp_world_size == batches, "train_batch_size was resolved for ", config.dp_world_size,
                       " data-parallel ranks, found ", batches, "; parse the config for the ranks that run");
  require<ConfigError>(!config.data_parallel_size || *config.data_parallel_size == batches,
                       "data_parallel_size: expected ", batches, ", the ranks that run, found ",
                       config.data_parallel_size.value_or(0), "; remove the key or start ",
                       fixed(static_cast<double>(config.data_parallel_size.value_or(0)) *
                                 static_cast<double>(topology.pipe * topology.tensor * topology.sequence),
                             0),
                       " ranks");
  require<ConfigError>(
      config.gradient_clip_by_value == 0 || config.gradient_clipping == 0 || !config.given("gradient_clipping"),
      "gradient_clip_by_value: ", config.gradient_clip_by_value,
      " excludes gradient_clipping: ", config.gradient_clipping,
      " (clipping by norm); keep one, or set the other to 0");
}

// Chooses what becomes of steps with gradients that are not finite: non_finite_gradients. The norm is judged.
void choose_non_finite(const DsConfig& config, Plan& plan) {
  using config::NonFiniteGradients;
  constexpr const char* kKey = "non_finite_gradients: ";
  const bool skips =
      config.fp16.enabled || scales_autocast(config) || (config.bf16.enabled && config.bf16.check_grad_overflow);
  const bool norm = config.zero_optimization.compute_grad_norm;
  plan.non_finite = config.non_finite_gradients;
  if (plan.non_finite == NonFiniteGradients::kAuto) {
    plan.non_finite = skips                          ? NonFiniteGradients::kSkip
                      : config.bf16.enabled || !norm ? NonFiniteGradients::kContinue
                                                     : NonFiniteGradients::kError;
  }
  const bool is_continue = plan.non_finite == NonFiniteGradients::kContinue;
  const char* name = is_continue                                    ? "\"continue\""
                     : plan.non_finite == NonFiniteGradients::kSkip ? "\"skip\""
                                                                    : "\"error\"";
  require<ConfigError>(plan.loss_scaling != LossScaling::kDynamic || plan.non_finite == NonFiniteGradients::kSkip, kKey,
                       name, " excludes a dynamic loss scale, which finds its size by overflows; remove the key, or ",
                       "set fp16.loss_scale to a number");
  require<ConfigError>(is_continue || norm || skips, kKey, name, " needs the gradient norm, found ",
                       "zero_optimization.compute_grad_norm: false; remove one of them");
  plan.compute_grad_norm = norm || !is_continue;
  plan.locate_non_finite = config.locate_non_finite;
  require<ConfigError>(!plan.locate_non_finite || plan.compute_grad_norm, "locate_non_finite: true needs the gradient ",
                       "norm, found zero_optimization.compute_grad_norm: false; remove one of them");
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

// zero_hpz_partition_size: ranks of a node. A node of all ranks is the plain case; DeepSpeed takes a larger one for it.
void choose_node(const config::ZeroSection& zero, Plan& plan) {
  const int64_t node = zero.zero_hpz_partition_size;
  if (node <= 1 || node >= plan.shard_ranks) return;
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
  if (zero.stage3_release_always) {
    plan.bucket_elements = 1;
    plan.persistent_numel = 0;
    plan.gather = zero::GatherLimits{.max_live = 1, .max_reuse_distance = 0, .prefetch = 0};
  }
  if (zero.zero_quantized_weights && plan.shard_ranks > 1) plan.weight_bits = 8;
  if (zero.zero_quantized_nontrainable_weights) plan.frozen_bits = 8;
}

// zero_quantized_gradients: a node is what zero_hpz_partition_size says, else a host.
void choose_gradient_quantization(const config::ZeroSection& zero, Plan& plan) {
  if (!zero.zero_quantized_gradients || !plan.partition_optimizer || plan.shard_ranks == 1) return;
  plan.gradient_bits = 4;
  const int64_t node = plan.node_ranks > 1 ? plan.node_ranks : plan.topology.ranks_per_host;
  if (plan.shard_ranks % node == 0) plan.gradient_node_ranks = node;
}

// gradient_compression. A node is what it is to zero_quantized_gradients.
void choose_gradient_compression(const config::GradientCompressionSection& section, Plan& plan) {
  if (section.method == config::CompressionMethod::kFloat16) plan.communication_dtype = DType::kFloat16;
  if (section.method == config::CompressionMethod::kBFloat16) plan.communication_dtype = DType::kBFloat16;
  if (!section.compresses() || plan.shard_ranks == 1) return;
  const int64_t node = plan.node_ranks > 1 ? plan.node_ranks : plan.topology.ranks_per_host;
  if (section.between_nodes_only) {
    if (node >= plan.shard_ranks) return;  // nothing goes between nodes
    require<ConfigError>(plan.shard_ranks % node == 0, "gradient_compression.between_nodes_only: expected nodes that ",
                         "divide the ", plan.shard_ranks, " ranks that share gradients, found ", node,
                         " ranks in a node; set it to false, or change zero_optimization.zero_hpz_partition_size or ",
                         "mics_shard_size");
    plan.compression_node_ranks = node;
  }
  plan.compression = section;
  plan.communication_dtype = plan.gradient_dtype;  // of what is compressed
}

// The bytes that error feedback keeps for so many elements; warm starts are small beside it.
int64_t compression_memory(const Plan& plan, int64_t parameters) {
  constexpr int64_t kError = 4;  // float32
  if (!plan.compression.compresses() || !plan.compression.error_feedback) return 0;
  return parameters * kError / plan.compression_node_ranks;
}

// OneBitAdam, OneBitLamb, ZeroOneAdam: ranks exchange what the optimizer makes of their own whole gradients.
void choose_compressed_optimizer(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const std::string& type = config.optimizer.type;
  const OptimizerDescription* const row = find_optimizer(type);
  if (facts.client_optimizer || row == nullptr || !row->compresses) return;
  const config::ZeroSection& zero = config.zero_optimization;
  const bool whole = row->last_stage == 0;
  require<ConfigError>(zero.stage <= row->last_stage, "optimizer.type: ", type, " needs zero_optimization.stage ",
                       whole ? "0, because ranks step on whole parameters by themselves" : "0, 1 or 2", ", found ",
                       zero.stage);
  require<ConfigError>(plan.offload.optimizer == zero::Home::kDevice, "optimizer.type: ", type, " excludes ",
                       "zero_optimization.offload_optimizer; remove one of them");
  require<ConfigError>(!zero.zero_quantized_gradients, "optimizer.type: ", type, " excludes ",
                       "zero_optimization.zero_quantized_gradients; it compresses what it sends itself");
  require<ConfigError>(plan.shard_ranks == plan.topology.dp, "optimizer.type: ", type, " excludes ",
                       "zero_optimization.mics_shard_size; remove one of them");
  plan.error_feedback = true;
  plan.separate_master = plan.separate_master || whole;
  // Local gradients need whole buckets.
  if (zero.stage == 2) plan.gradient_policy = zero::ReductionPolicy::kReduceScatterAtBoundary;
}

// Chooses stages, chunks and schedule, and refuses what a pipeline excludes.
void choose_pipeline(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  const int64_t ranks = plan.topology.pipe;
  require<ConfigError>(facts.pipeline_module || ranks == 1, "pipeline.stages: expected 1 for a model that is no ",
                       "pipeline::PipelineModule, found ", ranks,
                       "; give the model as a list of layers, or remove the ", "key");
  if (!facts.pipeline_module) return;
  require<ConfigError>(plan.topology.sequence == 1, "sequence_parallel_size: expected 1 with a ",
                       "pipeline::PipelineModule, whose schedule cuts no sequences, found ", plan.topology.sequence,
                       "; give the model as one module, or remove the key");
  require<ConfigError>(!config.sparse_gradients, "sparse_gradients: true excludes a pipeline::PipelineModule, whose ",
                       "buckets follow its stages and what they share; remove it, or give the model as one module");
  const auto& listed = config.torch_autocast.lower_precision_safe_modules;
  require<ConfigError>(!config.torch_autocast.enabled || !listed || listed->empty(),
                       "torch_autocast.lower_precision_safe_modules excludes a pipeline::PipelineModule, whose ",
                       "buckets follow its stages and what they share; remove it, or give the model as one module");
  require<ConfigError>(facts.trains,
                       "optimizer: expected this section in the ds_config with a pipeline::PipelineModule, ",
                       "found none; add \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}}, also where ",
                       "eval_batch() alone is called");
  const std::string& schedule = config.pipeline.schedule;
  plan.pipeline = {.schedule = schedule, .chunks = config.pipeline.chunks.value_or(1), .own = nullptr};
  if (config.pipeline.own_schedule) {
    const pipeline::Schedule& own = *config.pipeline.own_schedule;
    require<ConfigError>(own.shape.ranks == ranks, "pipeline.schedule: ", schedule, ": expected actions of ", ranks,
                         " ranks, which pipeline.stages says, found ", own.shape.ranks);
    require<ConfigError>(own.shape.micro_batches == config.gradient_accumulation_steps, "pipeline.schedule: ", schedule,
                         ": expected ", config.gradient_accumulation_steps, " micro-batches, which ",
                         "gradient_accumulation_steps says, found ", own.shape.micro_batches);
    plan.pipeline->chunks = own.shape.chunks;
    plan.pipeline->own = config.pipeline.own_schedule;
  } else {
    const pipeline::ScheduleKind kind = pipeline::parse_schedule_kind(schedule);
    require<ConfigError>(kind != pipeline::ScheduleKind::kInference, "pipeline.schedule: expected one that trains, ",
                         "found ", schedule);
    if (!config.pipeline.chunks) plan.pipeline->chunks = pipeline::default_chunks(kind);
    plan.pipeline->schedule = pipeline::name_of(kind);
    // Throws where they do not fit.
    pipeline::make_schedule(kind, {.ranks = static_cast<int>(ranks),
                                   .chunks = static_cast<int>(plan.pipeline->chunks),
                                   .micro_batches = static_cast<int>(config.gradient_accumulation_steps)});
  }
  require<ConfigError>(
      !plan.offload.speculative, "zero_optimization.offload_optimizer.super_offload: expected false ",
      "with a pipeline, found true: its last backward of a batch is known to one rank only; remove it");
  require<ConfigError>(config.managed_gradient_accumulation, "managed_gradient_accumulation: expected true with a ",
                       "pipeline, found false: train_batch() is one step; remove the key");
}

// Refuses what excludes parts of parameters. All else works on each rank's parts as on full parameters.
void require_possible_on_parts(const DsConfig& config, const PlanFacts& facts, const Plan& plan) {
  if (plan.topology.tensor == 1) return;
  const std::string key = cat("tensor_parallel.autotp_size: ", plan.topology.tensor, " excludes ");
  require<ConfigError>(!facts.client_optimizer || facts.client_on_slices, key,
                       "a client optimizer: it has the module's parameters, and what is ",
                       "trained are their parts. Use the optimizer section of the config, or set autotp_size to 1");
  require<ConfigError>(!config.sparse_gradients, key,
                       "sparse_gradients: of a table of words a rank has a part. Set it ",
                       "to false, or autotp_size to 1");
  const std::string& type = config.optimizer.type;
  const auto& offload = config.zero_optimization.offload_optimizer;
  require<ConfigError>(
      !config.tensor_parallel.sequence_parallel || !offload || !offload->super_offload,
      "tensor_parallel.sequence_parallel: true excludes offload_optimizer.super_offload: it updates ",
      "whole parameters before their gradients are added up over the tensor axis. Remove one of the two");
  const OptimizerDescription* const row = find_optimizer(type);
  require<ConfigError>(row == nullptr || row->elementwise || !row->compresses, key, "optimizer.type: ", type,
                       ", whose factors are of whole tensors, where ",
                       "each rank has a part. Use Lamb, OneBitAdam or another optimizer, or set autotp_size to 1");
  require<ConfigError>(
      !config.fp8.enabled || !config.tensor_parallel.tp_overlap_comm,
      "tensor_parallel.tp_overlap_comm: true excludes fp8: it computes gradients of split layers in a ",
      "backward of its own, which is not on FP8. Remove one of the two");
}

// With a folder for each host, a rank reads what ranks of its own host have written.
void require_local_checkpoints(const DsConfig& config, const Plan& plan) {
  if (!config.checkpoint.use_node_local_storage) return;
  require<ConfigError>(plan.frozen_bits == 0, "checkpoint.use_node_local_storage excludes ",
                       "zero_optimization.zero_quantized_nontrainable_weights, which is encoded from whole tensors at ",
                       "a load. Set it to false and save to a file system that all hosts share");
}

// Chooses when buckets are reduced, how large they are at best, and how long hooks wait for other ranks.
void choose_reductions(const PlanFacts& facts, Plan& plan) {
  plan.gradient_policy = zero::fitting_policy(plan.gradient_policy, static_cast<int>(plan.shard_ranks),
                                              plan.offload.optimizer != zero::Home::kDevice);
  // Between devices the last bucket's reduction and the first one's gather hide behind nothing: an eighth of a model is
  // too much, and collectives of so many bytes have their full rate.
  constexpr int64_t kDeviceBucketBytes = int64_t{96} << 20;
  if (facts.accelerator && plan.shard_ranks > 1) plan.bucket_target_bytes = kDeviceBucketBytes;
  // Ranks of a tensor axis wait for each other's sums inside backward, those of a sequence for attention, as those of
  // stage 3 wait for gathers, and uneven parts end their buckets at different parameters. On a device the host does not
  // wait for a reduction, and would now.
  const bool waits_in_backward = plan.topology.tensor > 1 || plan.topology.sequence > 1;
  if (plan.gather || (waits_in_backward && !facts.accelerator)) plan.reduction_patience = kReductionPatience;
}

void choose_gradients(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
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
  choose_offload(config, facts, plan);
  if (zero.stage == 3 && (plan.shard_ranks > 1 || plan.offload.parameters != zero::Home::kDevice)) {
    choose_gathering(zero, plan);
  }
  choose_gradient_quantization(zero, plan);
  choose_gradient_compression(config.gradient_compression, plan);
  plan.sparse_gradients = config.sparse_gradients && plan.shard_ranks > 1;
  choose_compressed_optimizer(config, facts, plan);
  choose_reductions(facts, plan);
  const auto& listed = config.torch_autocast.lower_precision_safe_modules;
  if (plan.autocast && listed && plan.shard_ranks > 1 && !plan.error_feedback) plan.sent_in_autocast = *listed;
  plan.require_all_gradients = !zero.ignore_unused_parameters;
  plan.clip_value = config.gradient_clip_by_value;
  if (facts.trains) choose_speculation(config, facts, plan);
  plan.clip_norm = plan.clip_value > 0 && !config.given("gradient_clipping") ? 0.0 : config.gradient_clipping;
  choose_non_finite(config, plan);
}

}  // namespace

zero::MemoryQuestion memory_question(const DsConfig& config, const Plan& plan, int64_t parameters) {
  // One rank reduces nothing: its policy says nothing of the stage.
  const bool whole_gradients =
      plan.shard_ranks > 1 && plan.gradient_policy != zero::ReductionPolicy::kReduceScatterEveryBackward;
  const auto stage = static_cast<int>(config.zero_optimization.stage);
  const int64_t states = optimizers::state_tensors_of(plan.optimizer, config.optimizer.values);
  return {.stage = whole_gradients ? std::min(stage, 1) : stage,
          .dp = plan.shard_ranks,
          .copies = plan.topology.dp / plan.shard_ranks,
          .node_ranks = plan.node_ranks,
          .parameters = parameters,
          .bucket_limit = plan.bucket_elements,
          .parameter_bytes = bytes_of(plan.model_dtype),
          .gradient_bytes = bytes_of(plan.gradient_dtype),
          .communication_bytes = bytes_of(plan.communication_dtype),
          .master_bytes = bytes_of(plan.master_dtype),
          .separate_master = plan.separate_master,
          .state_bytes = bytes_of(plan.state_dtype),
          .optimizer_state_bytes = states * bytes_of(plan.state_dtype),
          .error_feedback = plan.error_feedback,
          .weight_bits = plan.weight_bits,
          .gradient_bits = plan.gradient_bits,
          .gradient_node_ranks = plan.gradient_node_ranks,
          .accumulation_steps = config.gradient_accumulation_steps,
          .gather = plan.gather,
          .offload = plan.offload};
}

namespace {

Plan drafted(const DsConfig& config, const Topology& topology, const PlanFacts& facts) {
  require_consistent(config, topology);
  Plan plan;
  plan.topology = topology;
  plan.trains = facts.trains;
  require_possible_on_parts(config, facts, plan);
  choose_precision(config, facts, plan);
  choose_gradients(config, facts, plan);
  choose_pipeline(config, facts, plan);
  require_local_checkpoints(config, plan);
  if (!facts.client_optimizer && facts.trains) plan.optimizer = config.optimizer.algorithm();
  plan.schedule = config.scheduler.type;
  plan.backend = config.communication_backend;
  const config::TensorParallelSection& tensor = config.tensor_parallel;
  plan.tensor = {.sequence_parallel = tensor.sequence_parallel,
                 .overlap = tensor.tp_overlap_comm,
                 .verify = tensor.verify,
                 .split_parameters = {}};
  return plan;
}

void predict_bytes(const DsConfig& config, Plan& plan) {
  if (!plan.parameters) return;
  const zero::MemoryQuestion question = memory_question(config, plan, *plan.parameters);
  plan.bytes = zero::predict_model_state(question);
  plan.step_bytes = zero::predict_step(question);
  plan.offloaded_bytes = zero::predict_offloaded(question);
  plan.compression_bytes = compression_memory(plan, *plan.parameters);
}

template <class Work>
auto with_source(const DsConfig& config, const Work& work) {
  try {
    return work();
  } catch (const ConfigError& error) {
    throw ConfigError(cat(config.source, ": ", error.what()));
  }
}

}  // namespace

Plan draft_plan(const DsConfig& config, const Topology& topology, const PlanFacts& facts) {
  config::require_supported(config);
  return with_source(config, [&] { return drafted(config, topology, facts); });
}

void complete_plan(const DsConfig& config, const PlanFacts& facts, Plan& plan) {
  with_source(config, [&] {
    if (!facts.first_float64.empty()) change_to_float64(config, facts, plan);
    plan.tensor.split_parameters = facts.split_parameters;
    plan.parameters = facts.parameters;
    plan.activation_bytes = facts.activation_bytes;
    predict_bytes(config, plan);
    add_rows(config, facts, plan);
  });
}

Plan make_plan(const DsConfig& config, const Topology& topology, const PlanFacts& facts) {
  Plan plan = draft_plan(config, topology, facts);
  complete_plan(config, facts, plan);
  return plan;
}

}  // namespace ds::engine
