#include "config/plan/plan_choices.h"
#include "config/plan/plan_rows.h"
#include "core/text.h"

namespace ds::engine {
namespace {

// moot(asked, key, why)
template <class Moot>
void add_rows_of_sampling(const config::DataEfficiencySection& data, const Moot& moot) {
  const config::DataSamplingSection& sampling = data.data_sampling;
  if (!data.enabled || !sampling.enabled) return;
  const config::CurriculumSection& curriculum = sampling.curriculum_learning;
  moot(!curriculum.enabled, "data_sampling", "curriculum_learning in it is off, as is dynamic_batching");
  moot(curriculum.enabled && curriculum.data_cluster_path.has_value(), "data_cluster_path",
       "clusters are made of the metric files again, nothing is written");
  moot(sampling.pin_memory, "pin_memory", "what travels to a GPU is pinned already");
}

template <class Moot>
void add_rows_of_offload(const config::ZeroSection& zero, const Plan& plan, const Moot& moot) {
  if (zero.offload_optimizer && plan.offload.optimizer == zero::Home::kDevice) {
    constexpr const char* kOnDevice = "the optimizer is not offloaded";
    moot(zero.offload_optimizer->delayed_update, "delayed_update", kOnDevice);
    moot(zero.offload_optimizer->ratio != 1.0, "ratio", kOnDevice);
    moot(zero.offload_optimizer->pipeline_read, "pipeline_read", kOnDevice);
    moot(zero.offload_optimizer->pipeline_write, "pipeline_write", kOnDevice);
  }
  moot(zero.stage == 0 && zero.optimizer_device() != config::OffloadDevice::kNone, "offload_optimizer",
       "stage 0 keeps everything on the device");
  moot(zero.stage < 3 && zero.param_device() != config::OffloadDevice::kNone, "offload_param",
       "parameters are whole on the device below stage 3");
}

}  // namespace

bool is_given(const config::DsConfig& config, const std::string& key) {
  const size_t dot = key.find('.');
  const std::string section = key.substr(0, dot);
  if (!config.given(section) || dot == std::string::npos) return config.given(section);
  return config.text[section].is_object() && config.text[section].contains(key.substr(dot + 1));
}

// Keys that change how DeepSpeed moves data and that this layout has no use for.
void add_rows_without_effect(const config::DsConfig& config, Plan& plan) {
  const config::ZeroSection& zero = config.zero_optimization;
  const auto moot = [&](bool asked, const char* key, const char* why) {
    if (asked) plan.rows.push_back({key, "no effect", why});
  };
  moot(zero.round_robin_gradients, "round_robin_gradients", "every bucket is divided evenly among the ranks already");
  moot(zero.parameter_alignment, "parameter_alignment", "parameters start at multiples of 64 bytes already");
  moot(!zero.contiguous_gradients, "contiguous_gradients", "gradients are always views of their bucket");
  moot(zero.stage > 0 && !zero.reduce_scatter, "reduce_scatter", "each rank receives its slice only; same sums");
  moot(zero.stage == 3 && is_given(config, "zero_optimization.sub_group_size"), "sub_group_size",
       "the optimizer goes bucket by bucket already");
  moot(zero.stage == 3 && zero.stage3_module_granularity_threshold > 0, "stage3_module_granularity_threshold",
       "small modules share a bucket, which is gathered as one, already");
  moot(zero.stage == 3 && zero.stage3_use_all_reduce_for_fetch_params, "stage3_use_all_reduce_for_fetch_params",
       "slices are gathered in place; an all-reduce would send twice as much");
  const config::LeafModuleSection& leaf = zero.leaf_module;
  moot(!leaf.classes.empty() || !leaf.names.empty() || !leaf.name_suffixes.empty(), "leaf_module",
       zero.stage == 3 ? "operators gather what they read, not modules; what some ranks do not use, as experts without "
                         "tokens, is read in a scope of engine->gathered_parameters()"
                       : "parameters are whole below stage 3");
  moot(zero.stage == 0 && plan.loss_scaling == LossScaling::kDynamic && is_given(config, "fp16.hysteresis"),
       "hysteresis", "at stage 0 each overflow halves the loss scale, as in DeepSpeed");
  moot(zero.stage3_release_always && !plan.gather, "stage3_release_always",
       zero.stage < 3 ? "parameters are whole below stage 3" : "one rank has all parameters");
  moot(zero.stage > 0 && !zero.allgather_partitions, "allgather_partitions", "slices are always all-gathered");
  moot(!plan.average_gradients && config.prescale_gradients, "prescale_gradients",
       "gradient_allreduce_op: sum divides by nothing");
  moot(!plan.average_gradients && config.gradient_predivide_factor != 1.0, "gradient_predivide_factor",
       "gradient_allreduce_op: sum divides by nothing");
  add_rows_of_offload(zero, plan, moot);
  moot(config.aio.use_gds && plan.offload.parameters != zero::Home::kFile, "use_gds",
       "no parameters are in files: optimizer states are updated on the host, which reads them there");
  moot(zero.stage == 0 && zero.mics_shard_size > 0, "mics_shard_size", "stage 0 partitions nothing");
  moot(zero.zero_hpz_partition_size > 1 && !plan.gather, "zero_hpz_partition_size", "parameters are whole already");
  moot(zero.zero_hpz_partition_size > 1 && plan.gather && plan.node_ranks == 1, "zero_hpz_partition_size",
       "a node holds all ranks that share the parameters");
  moot(zero.zero_quantized_weights && plan.weight_bits == 0, "zero_quantized_weights",
       plan.gather ? "no ranks share parameters, nothing is sent" : "parameters are whole already");
  moot(zero.zero_quantized_nontrainable_weights && !plan.gather, "zero_quantized_nontrainable_weights",
       "parameters are whole already");
  moot(zero.zero_quantized_gradients && plan.gradient_bits == 0, "zero_quantized_gradients",
       plan.partition_optimizer ? "no ranks share slices; copies are joined as they are"
                                : "stage 0 reduces whole buckets by all-reduce");
  const auto& listed = config.torch_autocast.lower_precision_safe_modules;
  moot(plan.autocast && listed && !listed->empty() && plan.sent_in_autocast.empty(), "lower_precision_safe_modules",
       plan.error_feedback ? "the optimizer compresses what ranks exchange itself" : "no ranks share gradients");
  const auto& kept = config.data_types.keep_in_fp32_modules;
  moot(kept && !kept->empty() && !narrows_buffers(plan), "keep_in_fp32_modules", "no buffers are cast to 16 bits");
  moot(config.sparse_gradients && !plan.sparse_gradients, "sparse_gradients", "no ranks share gradients");
  moot(zero.mics_hierarchical_params_gather, "mics_hierarchical_params_gather",
       "collectives go through shared memory inside a host and between hosts once already");
  add_rows_of_sampling(config.data_efficiency, moot);
}

}  // namespace ds::engine
