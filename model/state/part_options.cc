#include "model/state/part_options.h"

#include <cmath>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "optim/muon.h"
#include "optim/optimizer_table.h"

namespace ds::engine {
namespace {

// Gives each trainable parameter a part: the stage that it belongs to or, numbered beyond all stages, its tie.
void choose_pipeline_parts(const PipelineState& parts, const ModelParameters& parameters, BucketOptions& options) {
  std::unordered_map<const void*, int> part_of;
  for (size_t k = 0; k < parts.tied.size(); ++k) {
    const int part = parts.stages() + static_cast<int>(k);
    for (const at::Tensor& tensor : parts.tied[k].parameters) {
      part_of[trained_tensor(tensor).unsafeGetTensorImpl()] = part;
    }
    options.shared_parts.push_back(part);
  }
  for (int stage = 0; stage < parts.stages(); ++stage) {
    for (const at::Tensor& tensor : parts.module->parameters_of(stage)) {
      part_of.emplace(trained_tensor(tensor).unsafeGetTensorImpl(), stage);
    }
  }
  for (const zero::Parameter& parameter : parameters.trainable) {
    options.parts.push_back(part_of.at(parameter.tensor.unsafeGetTensorImpl()));
  }
}

// Divides each part in two: parameters that are whole on the ranks of a tensor axis, and those that are cut.
void choose_tensor_parts(const ModelParameters& parameters, BucketOptions& options) {
  options.parts.resize(parameters.trainable.size(), 0);
  for (size_t i = 0; i < parameters.trainable.size(); ++i) {
    options.parts[i] = 2 * options.parts[i] + (parameters.trainable[i].part ? 1 : 0);
  }
  std::vector<int> shared;
  for (const int part : options.shared_parts) shared.insert(shared.end(), {2 * part, 2 * part + 1});
  options.shared_parts = std::move(shared);
}

// Counts the tensors of optimizer state that a bucket has. Muon leaves some buckets to AdamW.
int64_t state_tensors(const config::OptimizerSection& section, const zero::BucketLayout& bucket,
                      const std::vector<ParameterInfo>& infos) {
  const optimizers::OptimizerDescription* const row = optimizers::find_optimizer(section.type);
  const ParameterInfo& first = infos[static_cast<size_t>(bucket.segments.front().parameter)];
  const bool is_rest = row != nullptr && row->values_of_rest && !optimizers::uses_muon(first);
  return optimizers::state_tensors_of(is_rest ? "AdamW" : section.type, section.values);
}

}  // namespace

at::ScalarType scalar_type(config::DType dtype) {
  switch (dtype) {
    case config::DType::kBFloat16:
      return at::kBFloat16;
    case config::DType::kFloat16:
      return at::kHalf;
    case config::DType::kFloat64:
      return at::kDouble;
    case config::DType::kFloat32:
      break;
  }
  return at::kFloat;
}

std::optional<at::ScalarType> scalar_type(const std::optional<config::DType>& dtype) {
  return dtype ? std::optional(scalar_type(*dtype)) : std::nullopt;
}

zero::ReducerOptions reducer_options(const Plan& plan, const std::string& model) {
  zero::ReducerOptions options;
  options.model = model;
  options.policy = plan.gradient_policy;
  options.overlap = plan.overlap_reduction;
  options.average = plan.average_gradients;
  options.prescale = plan.prescale_gradients;
  options.predivide_factor = plan.predivide_factor;
  options.gradient_dtype = scalar_type(plan.gradient_dtype);
  options.communication_dtype = scalar_type(plan.communication_dtype);
  options.leave_in_backward = plan.offload.speculative;
  options.patience = plan.reduction_patience;
  return options;
}

BucketOptions bucket_options(const Plan& plan, const PipelineState* pipeline, const ModelParameters& parameters) {
  BucketOptions options = {.max_bucket_elements = plan.bucket_elements,
                           .most_target_elements = plan.bucket_target_bytes / bytes_of(plan.model_dtype),
                           .dtype = scalar_type(plan.model_dtype),
                           .buffer_dtype = scalar_type(plan.buffer_dtype),
                           .master_dtype = scalar_type(plan.master_dtype),
                           .separate_master = plan.separate_master,
                           .partition = plan.partition_optimizer,
                           .shard = plan.gather.has_value(),
                           .persistent_numel = plan.persistent_numel,
                           .persistent_total = plan.persistent_total,
                           .frozen_bits = plan.frozen_bits};
  if (pipeline) choose_pipeline_parts(*pipeline, parameters, options);
  if (plan.topology.tensor > 1) choose_tensor_parts(parameters, options);
  return options;
}

OffloadedLayout offloaded_layout(const ModelState& model, const ModelLayout& layout,
                                 const config::OptimizerSection& optimizer) {
  OffloadedLayout offloaded = {.buckets = layout.buckets,
                               .frozen = layout.frozen,
                               .states = {},
                               .parameter_dtype = scalar_type(model.plan.model_dtype),
                               .gradient_dtype = scalar_type(model.plan.gradient_dtype),
                               .master_dtype = scalar_type(model.plan.master_dtype),
                               .state_dtype = scalar_type(model.plan.state_dtype),
                               .device = model.ranks.device,
                               .rank = model.ranks.world->rank()};
  const auto& client = model.optimizer.client_states;
  const auto client_tensors = [&](const zero::BucketLayout& bucket) {
    const auto group = static_cast<size_t>(bucket.group);
    return group < client->size() ? static_cast<int64_t>((*client)[group].names.size()) : 0;
  };
  for (const zero::BucketLayout& bucket : layout.buckets) {
    offloaded.states.push_back(client ? client_tensors(bucket) : state_tensors(optimizer, bucket, model.infos));
  }
  return offloaded;
}

optimizers::LossScalerOptions loss_scaler_options(const config::DsConfig& config) {
  const config::Fp16Section& fp16 = config.fp16;
  if (!fp16.enabled) return optimizers::torch_rule();  // of float16 autocast, as DeepSpeed: torch.amp.GradScaler's
  return {.static_scale = fp16.loss_scale,
          .initial_scale = std::ldexp(1.0, static_cast<int>(fp16.initial_scale_power)),
          .window = fp16.loss_scale_window,
          .hysteresis = fp16.hysteresis,
          .consecutive_hysteresis = fp16.consecutive_hysteresis,
          .minimum_scale = static_cast<double>(fp16.min_loss_scale),
          .tolerant = config.zero_optimization.stage == 0};
}

recompute::CheckpointOptions checkpoint_options(const config::ActivationCheckpointingSection& section,
                                                recompute::CheckpointOptions own) {
  require<ConfigError>(section.number_checkpoints.value_or(1) > 0,
                       "activation_checkpointing.number_checkpoints: expected a positive number, found ",
                       section.number_checkpoints.value_or(0), "; it is the number of regions of one forward pass");
  own.cpu_checkpointing = section.cpu_checkpointing;
  own.partition_activations = section.partition_activations;
  own.contiguous_memory_optimization = section.contiguous_memory_optimization;
  own.number_checkpoints = section.number_checkpoints;
  own.synchronize_checkpoint_boundary = section.synchronize_checkpoint_boundary;
  own.profile = section.profile;
  return own;
}

std::chrono::milliseconds stall_limit(const config::DsConfig& config) {
  return std::chrono::milliseconds(std::llround(config.flight_recorder.stall_limit * 1e3));
}

}  // namespace ds::engine
