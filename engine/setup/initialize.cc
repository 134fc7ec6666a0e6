// engine::initialize: the one place that puts the parts together, in the order of docs/design.md, section 5.
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "comm/backends/factory.h"
#include "comm/meeting/rendezvous.h"
#include "core/check.h"
#include "core/host_memory.h"
#include "core/log.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/engine.h"
#include "dsengine/init_distributed.h"
#include "dsengine/lr_schedule.h"
#include "engine/engine_impl.h"
#include "engine/setup/optimizer_setup.h"
#include "engine/setup/rank_device.h"
#include "engine/setup/same_on_all_ranks.h"
#include "engine/setup/seed.h"
#include "engine/state/autocast.h"
#include "engine/state/gradient_compression.h"
#include "engine/state/model_layout.h"

namespace ds::engine {
namespace {

at::ScalarType scalar_type(config::DType dtype) {
  switch (dtype) {
    case config::DType::kBFloat16:
      return at::kBFloat16;
    case config::DType::kFloat16:
      return at::kHalf;
    case config::DType::kFloat32:
      break;
  }
  return at::kFloat;
}

zero::ReducerOptions reducer_options(const Plan& plan) {
  zero::ReducerOptions options;
  options.policy = plan.gradient_policy;
  options.overlap = plan.overlap_reduction;
  options.average = plan.average_gradients;
  options.prescale = plan.prescale_gradients;
  options.predivide_factor = plan.predivide_factor;
  options.gradient_dtype = scalar_type(plan.gradient_dtype);
  options.communication_dtype = scalar_type(plan.communication_dtype);
  options.leave_in_backward = plan.offload.speculative;
  if (plan.gather) options.patience = std::chrono::milliseconds(200);
  return options;
}

// For recompute::checkpoint() on this thread. Without the section the program's own settings stay.
void configure_activation_checkpoints(const config::DsConfig& config) {
  if (!config.given("activation_checkpointing")) return;
  const config::ActivationCheckpointingSection& section = config.activation_checkpointing;
  require<ConfigError>(section.number_checkpoints.value_or(1) > 0,
                       "activation_checkpointing.number_checkpoints: expected a positive number, found ",
                       section.number_checkpoints.value_or(0), "; it is the number of regions of one forward pass");
  recompute::CheckpointOptions options = recompute::checkpoint_options();  // what has no key is the program's
  options.cpu_checkpointing = section.cpu_checkpointing;
  options.partition_activations = section.partition_activations;
  options.contiguous_memory_optimization = section.contiguous_memory_optimization;
  options.number_checkpoints = section.number_checkpoints;
  options.synchronize_checkpoint_boundary = section.synchronize_checkpoint_boundary;
  options.profile = section.profile;
  recompute::configure_checkpointing(options);
}

std::shared_ptr<pipeline::PipelineModule> pipeline_of(const InitializeOptions& options) {
  return std::dynamic_pointer_cast<pipeline::PipelineModule>(options.model);
}

config::DsConfig parse_config(const InitializeOptions& options, int world_size) {
  const auto module = pipeline_of(options);
  const std::optional<int> stages = module ? module->options().stages : std::nullopt;
  config::DsConfig config =
      config::parse(options.config, {.world_size = world_size,
                                     .pipeline_stages = stages ? std::optional<int64_t>(*stages) : std::nullopt,
                                     .auto_values = options.auto_values});
  if (!module) return config;
  const pipeline::PipelineOptions& given = module->options();
  config::PipelineSection& section = config.pipeline;
  if (given.schedule) section.schedule = *given.schedule;
  if (given.chunks) section.chunks = *given.chunks;
  if (given.partition) section.partition = *given.partition;
  if (given.seed_layers) section.seed_layers = *given.seed_layers;
  if (given.activation_checkpoint_interval) {
    section.activation_checkpoint_interval = *given.activation_checkpoint_interval;
  }
  return config;
}

// Until the parts that split layers are here.
void require_whole_layers(const comm::DeviceMesh& mesh) {
  for (const auto axis : {comm::MeshAxis::kSequence, comm::MeshAxis::kTensor}) {
    require<ConfigError>(mesh.size(axis) == 1, "initialize: .mesh: axis ", comm::name_of(axis), ": expected 1, found ",
                         mesh.size(axis), "; this version has data and pipeline parallelism only");
  }
}

// The group that the program gives, and the device on it.
Distributed given_ranks(const InitializeOptions& options) {
  if (options.distributed) {
    Distributed job = *options.distributed;
    if (!options.device.empty()) job.device = device_of_rank(options.device, job.local_rank);
    return job;
  }
  const auto group = options.mesh           ? options.mesh->world()
                     : options.communicator ? options.communicator
                                            : options.init->ranks();
  at::Device device = parse_device(options.device);
  if (device.is_cuda() && !device.has_index()) {
    require<ConfigError>(group->size() == 1, "initialize: .device: expected cuda:N with a group of ", group->size(),
                         " ranks, found cuda; name the device of this rank, or pass .distributed");
    device.set_index(0);
  }
  if (options.mesh) require_whole_layers(*options.mesh);
  return {.ranks = group, .local_rank = group->rank(), .device = device};
}

std::chrono::milliseconds stall_limit(const config::DsConfig& config) {
  return std::chrono::milliseconds(std::llround(config.flight_recorder.stall_limit * 1e3));
}

// The ranks met before the config was read.
void configure_watch(comm::Communicator& ranks, const config::DsConfig& config) {
  if (!ranks.watch()) return;
  if (!config.flight_recorder.enabled) return ranks.watch()->stop();
  ranks.watch()->set_stall_limit(stall_limit(config));
  ranks.watch()->set_end_process(config.flight_recorder.end_process);
}

// The program's mesh or group, or the ranks of the environment. Reads the config once the number of ranks is known.
// Gives a "cuda" without number the one of this rank on its host.
Distributed join(const InitializeOptions& options, config::DsConfig& config) {
  const int given = (options.mesh ? 1 : 0) + (options.communicator ? 1 : 0) + (options.distributed ? 1 : 0);
  require(given <= 1, "initialize: expected one of .mesh, .communicator and .distributed, found ", given,
          "; each of them names the ranks");
  if (given == 1 || options.init) {
    Distributed job = given_ranks(options);
    require(!options.init || options.init->ranks() == job.ranks, "initialize: .init was made over another ",
            "group than the one given; expected zero::Init init(group) and the same group here");
    config = parse_config(options, job.ranks->size());
    configure_watch(*job.ranks, config);
    return job;
  }
  // The backend is a key of the config, which may need the number of ranks to be read.
  const comm::Rendezvous meeting = comm::rendezvous({.init_method = options.init_method, .timeout = options.timeout});
  const at::Device device = device_of_rank(options.device, meeting.local_rank);
  log::set_rank(meeting.rank, meeting.world_size);
  config = parse_config(options, meeting.world_size);
  Distributed job{.ranks = comm::make_communicator(meeting, device, config.communication_backend),
                  .local_rank = meeting.local_rank,
                  .ranks_per_host = ranks_per_host(meeting),
                  .device = device};
  if (config.flight_recorder.enabled) {
    comm::watch_flight(meeting, *job.ranks,
                       {.stall_limit = stall_limit(config),
                        .entries = static_cast<uint32_t>(config.flight_recorder.entries),
                        .folder = config.flight_recorder.folder,
                        .stacks = config.flight_recorder.stacks,
                        .end_process = config.flight_recorder.end_process});
  }
  return job;
}

// The program's grid of ranks, or pipelines of pipeline.stages ranks, with data-parallel ranks side by side.
std::shared_ptr<comm::DeviceMesh> mesh_of(const InitializeOptions& options, const Engine::Impl& impl) {
  const auto stages = static_cast<int>(impl.config.pipeline.stages.value_or(1));
  if (!options.mesh) {
    const comm::MeshLayout layout = comm::MeshLayout::fill_data({.pipe = stages}, impl.world->size());
    return std::make_shared<comm::DeviceMesh>(impl.world, layout);
  }
  require<ConfigError>(options.mesh->size(comm::MeshAxis::kPipe) == stages, "initialize: .mesh: axis pipe: expected ",
                       stages, ", which pipeline.stages says, found ", options.mesh->size(comm::MeshAxis::kPipe));
  return options.mesh;
}

// Ranks of a host among those that share a part of the model.
int64_t data_ranks_per_host(int64_t ranks_per_host, int64_t dp) {
  if (ranks_per_host >= dp) return dp;
  return dp % ranks_per_host == 0 ? ranks_per_host : 1;
}

void say_what_runs(const config::DsConfig& config, const Plan& plan) {
  for (const std::string& warning : config.warnings) log::warning(warning);
  for (const config::ResolvedAuto& choice : config.resolved_auto) {
    log::info("auto: ", choice.path, " = ", choice.value.dump(), " (", choice.source, ")");
  }
  if (config.dump_state) log::info("config:\n", config::to_json(config).dump(2));
  log::info("plan:\n", to_table(plan));
}

void require_compatible_client(const InitializeOptions& options, const Plan& plan, int64_t stage) {
  if (!options.optimizer) return;
  require<ConfigError>(!plan.partition_optimizer && !plan.separate_master,
                       "initialize: a client optimizer works on whole float32 parameters: expected ",
                       "zero_optimization.stage 0 without fp16 and bf16, found stage ", stage, " and ",
                       name_of(plan.model_dtype),
                       " parameters. Use the optimizer section of the config instead, or change these keys");
  require<ConfigError>(plan.gradient_dtype == plan.model_dtype, "data_types.grad_accum_dtype: expected ",
                       name_of(plan.model_dtype), ", the model's, with a client optimizer, found ",
                       name_of(plan.gradient_dtype), "; remove the key");
  require<ConfigError>(
      options.parameter_groups.empty(),
      "initialize: .parameter_groups belong to the optimizer of the config; a client optimizer has its ",
      "own groups. Remove one of the two");
}

std::shared_ptr<LrScheduler> make_schedule(const InitializeOptions& options, const config::DsConfig& config,
                                           const Engine::Impl& impl) {
  if (!options.lr_scheduler && !config.scheduler.options) return nullptr;
  std::vector<optimizers::GroupOptions> groups;
  if (impl.client_optimizer) {
    for (const double lr : learning_rates(*impl.client_optimizer)) groups.push_back({.lr = lr});
  } else {
    groups = impl.optimizer->groups();
  }
  LrScheduler::Rule rule;
  if (options.lr_scheduler) {
    const auto rates = impl.client_optimizer ? learning_rates(*impl.client_optimizer) : learning_rates(*impl.optimizer);
    rule = LrScheduler::scaled_by(options.lr_scheduler, rates);
  } else {
    const bool betas = impl.optimizer && impl.optimizer->uses_betas();
    rule = LrScheduler::of(optimizers::make_lr_schedule(*config.scheduler.options, groups, betas));
  }
  if (impl.client_optimizer) return std::make_shared<LrScheduler>(impl.client_optimizer, std::move(rule));
  return std::make_shared<LrScheduler>(impl.optimizer, std::move(rule));
}

optimizers::LossScalerOptions loss_scaler_options(const config::Fp16Section& fp16) {
  return {.static_scale = fp16.loss_scale,
          .initial_scale = std::ldexp(1.0, static_cast<int>(fp16.initial_scale_power)),
          .window = fp16.loss_scale_window,
          .hysteresis = fp16.hysteresis,
          .consecutive_hysteresis = fp16.consecutive_hysteresis,
          .minimum_scale = static_cast<double>(fp16.min_loss_scale)};
}

bool has_meta_tensors(const torch::nn::Module& module) {
  const auto is_meta = [](const at::Tensor& tensor) { return tensor.is_meta(); };
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  return std::any_of(parameters.begin(), parameters.end(), is_meta) ||
         std::any_of(buffers.begin(), buffers.end(), is_meta);
}

zero::StoredSlice stored_slice(const zero::ParameterBucket& bucket) {
  const int64_t bytes = bucket.stored_bytes();
  return {bucket.bits() > 0 ? bytes : bucket.layout().slice_numel, bytes};
}

// Prediction for the buckets as they are, in place of the estimate from a number of elements.
void predict_exactly(Engine::Impl& impl, int64_t trainable) {
  zero::MemoryQuestion question = memory_question(impl.config, impl.plan, trainable);
  for (const zero::ParameterBucket& bucket : impl.buckets) {
    question.buckets.push_back(bucket.layout().numel);
    question.persistent.push_back(bucket.layout().persistent ? 1 : 0);
  }
  question.frozen_bytes = impl.frozen_bytes();
  for (const zero::ParameterBucket& bucket : impl.frozen_buckets) {
    if (bucket.stored_bytes() > 0) question.frozen_slices.push_back(stored_slice(bucket));
  }
  for (const zero::ParameterBucket& bucket : impl.frozen_buckets) {
    if (!bucket.sharded()) continue;
    question.frozen_elements += bucket.layout().numel;
    question.largest_frozen_bucket = std::max(question.largest_frozen_bucket, bucket.layout().numel);
  }
  impl.plan.bytes = zero::predict_model_state(question);
  impl.plan.step_bytes = zero::predict_step(question);
  impl.plan.offloaded_bytes = zero::predict_offloaded(question);
  if (impl.reduction) impl.plan.compression_bytes = impl.reduction->memory_bytes();
  // How much of a model is matrices is known only now.
  if (impl.plan.optimizer != "Muon" && !impl.plan.error_feedback) return;
  impl.plan.bytes->optimizer = impl.device_state_bytes();
  if (impl.offloaded) impl.plan.offloaded_bytes = impl.offloaded->bytes();
}

// All that must be the same on every rank beside the model.
std::string settings_text(const InitializeOptions& options, const config::DsConfig& config,
                          const OptimizerGroups& groups) {
  std::string text = cat(config.text.dump(), options.optimizer ? " client optimizer" : "",
                         options.weights.empty() ? "" : " weights", options.init ? " init" : "");
  for (const int group : groups.group_of) text += cat(' ', group);
  for (const optimizers::GroupOptions& group : groups.options) {
    text += cat(" lr ", group.lr, " decay ", group.weight_decay, group.non_freeze ? " dense" : "");
  }
  for (const at::Tensor& mask : groups.masks) {
    if (!mask.defined()) continue;
    const at::Tensor moves = mask.ne(0).to(at::kCPU).contiguous();
    text += cat(" mask ", moves.sizes(), ' ', checkpoint::checksum(moves.const_data_ptr(), moves.nbytes()));
  }
  return text;
}

// Null where all stays on the device.
std::unique_ptr<OffloadedState> offload_state(const Engine::Impl& impl, const ModelLayout& layout) {
  const zero::Offload& offload = impl.plan.offload;
  if (offload.optimizer == zero::Home::kDevice && offload.parameters == zero::Home::kDevice) return nullptr;
  OffloadedLayout offloaded = {.buckets = layout.buckets,
                               .frozen = layout.frozen,
                               .states = {},
                               .parameter_dtype = scalar_type(impl.plan.model_dtype),
                               .gradient_dtype = scalar_type(impl.plan.gradient_dtype),
                               .device = impl.device,
                               .rank = impl.world->rank()};
  for (const zero::BucketLayout& bucket : layout.buckets) {
    offloaded.states.push_back(state_tensors(impl.config.optimizer, bucket, impl.parameter_infos));
  }
  return std::make_unique<OffloadedState>(impl.plan, impl.config, offloaded, *impl.world);
}

// Buckets, gradient reduction and publication of parameters, in the order in which they refer to one another.
void lay_out_model(Engine::Impl& impl, const ModelParameters& parameters, const std::vector<int>& group_of,
                   StartValues& values) {
  impl.parameters = parameters.trainable;
  impl.parameter_infos = parameters.infos;
  impl.frozen = parameters.frozen;
  BucketOptions options = {
      .max_bucket_elements = impl.plan.bucket_elements,
      .dtype = scalar_type(impl.plan.model_dtype),
      .buffer_dtype = impl.plan.buffer_dtype ? std::optional(scalar_type(*impl.plan.buffer_dtype)) : std::nullopt,
      .separate_master = impl.plan.separate_master,
      .partition = impl.plan.partition_optimizer,
      .shard = impl.plan.gather.has_value(),
      .persistent_numel = impl.plan.persistent_numel,
      .persistent_total = impl.plan.persistent_total,
      .frozen_bits = impl.plan.frozen_bits};
  if (impl.pipeline) choose_parts(*impl.pipeline, parameters, options);
  ModelLayout layout = lay_out(parameters, group_of, options, impl.groups.shards->size());
  impl.offloaded = offload_state(impl, layout);
  BucketedModel model =
      build_buckets(parameters, std::move(layout), options, values, impl.offloaded.get(), *impl.groups.shards);
  impl.buckets = std::move(model.buckets);
  impl.frozen_buckets = std::move(model.frozen_buckets);
  impl.masters = std::move(model.masters);
  if (impl.pipeline) note_buckets(*impl.pipeline, impl.buckets);
  impl.reduction = make_gradient_reduction(impl.plan, impl.groups, impl.buckets, impl.parameter_infos, impl.device);
  impl.reducer = std::make_unique<zero::GradientReducer>(
      impl.buckets, impl.parameters,
      zero::ReduceRoutes{*impl.groups.shards, impl.groups.replicas.get(), impl.reduction.get(),
                         impl.offloaded ? impl.offloaded->gradients() : nullptr},
      reducer_options(impl.plan));
  if (!impl.plan.gather) {
    impl.access =
        std::make_unique<zero::ParameterPublisher>(impl.buckets, *impl.groups.shards, impl.plan.partition_optimizer);
    return;
  }
  std::vector<zero::ParameterBucket*> buckets;
  for (zero::ParameterBucket& bucket : impl.buckets) buckets.push_back(&bucket);
  for (zero::ParameterBucket& bucket : impl.frozen_buckets) buckets.push_back(&bucket);
  auto gatherer = std::make_unique<zero::ParameterGatherer>(
      buckets, zero::GatherRoutes{*impl.groups.parameters, impl.groups.node.get(), impl.plan.weight_bits},
      *impl.plan.gather);
  impl.gatherer = gatherer.get();
  impl.access = std::move(gatherer);
}

std::shared_ptr<DataLoader> make_loader(const InitializeOptions& options, const Engine::Impl& impl) {
  if (!options.training_data) return nullptr;
  return std::make_shared<DataLoader>(options.training_data,
                                      DataLoaderOptions{.micro_batch_size = impl.config.train_micro_batch_size_per_gpu,
                                                        .rank = impl.communicator->rank(),
                                                        .world_size = impl.communicator->size(),
                                                        .seed = static_cast<uint64_t>(impl.config.seed),
                                                        .drop_last = impl.config.dataloader_drop_last,
                                                        .device = impl.device});
}

}  // namespace

Initialized initialize(InitializeOptions options) {
  require(options.model != nullptr, "initialize: expected a model, found none; pass .model = model.ptr()");
  require<ConfigError>(!options.config.empty(), "initialize: expected a ds_config, found none; pass ",
                       ".config = \"ds_config.json\"");
  auto impl = std::make_unique<Engine::Impl>();
  impl->module = options.model;
  const auto layers = pipeline_of(options);
  const Distributed job = join(options, impl->config);
  impl->world = job.ranks;
  impl->flight = job.ranks->watch();
  impl->note_phase("initialize");
  impl->local_rank = job.local_rank;
  impl->device = job.device;
  const config::DsConfig& config = impl->config;
  if (config.log_level) log::set_level(*config.log_level);
  impl->mesh = mesh_of(options, *impl);
  impl->communicator = impl->mesh->group({comm::MeshAxis::kData, comm::MeshAxis::kExpert});
  const int64_t dp = impl->communicator->size();
  impl->plan = make_plan(config,
                         {.world_size = impl->world->size(),
                          .dp = dp,
                          .pipe = impl->mesh->size(comm::MeshAxis::kPipe),
                          .ranks_per_host = data_ranks_per_host(job.ranks_per_host, dp)},
                         {.client_optimizer = options.optimizer != nullptr,
                          .accelerator = !impl->device.is_cpu(),
                          .pipeline_module = layers != nullptr});
  require_compatible_client(options, impl->plan, config.zero_optimization.stage);
  require<ConfigError>(options.optimizer || config.optimizer.given(),
                       "optimizer: expected this section in the ds_config ",
                       "or a client optimizer in initialize, found neither; add ",
                       "\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}}");
  if (options.seed_generators) seed_everything(static_cast<uint64_t>(config.seed), impl->world->rank());
  if (config.deterministic) set_deterministic(true);
  configure_activation_checkpoints(config);
  if (layers) {
    require(!options.init, "initialize: .init: expected none with a pipeline::PipelineModule, which builds its layers ",
            "on the ranks that have them; remove it");
    impl->pipeline = build_pipeline(layers, impl->mesh->group(comm::MeshAxis::kPipe), config, impl->plan, impl->device,
                                    *impl->world);
  }
  const bool placed_later = options.init || has_meta_tensors(*options.model);  // bucket by bucket
  if (!impl->device.is_cpu() && !placed_later) options.model->to(impl->device);

  if (impl->pipeline) share_start_values(*impl->pipeline);
  const ModelParameters parameters = collect_parameters(*options.model);
  OptimizerGroups groups;
  groups.group_of.assign(parameters.trainable.size(), 0);
  if (!options.optimizer) {
    groups = plan_groups(config.optimizer, parameters, options.parameter_groups, impl->plan.topology.pipe > 1);
  }
  if (impl->plan.topology.pipe > 1) {
    require_same_on_all_ranks({}, cat(config.text.dump(), layers_text(*impl->pipeline)), {}, impl->device,
                              *impl->world);
  }
  require_same_on_all_ranks(
      parameters, settings_text(options, config, groups),
      {.samples = options.training_data ? std::optional(options.training_data.size()) : std::nullopt,
       .has_schedule = options.lr_scheduler != nullptr},
      impl->device, *impl->communicator);
  impl->groups = make_rank_groups(impl->plan, impl->communicator);
  return_freed_host_memory();  // start values of a bucket, between slices that stay, would leave holes
  StartValues values(*options.model, options.weights, options.init, impl->device, *impl->communicator);
  lay_out_model(*impl, parameters, groups.group_of, values);
  if (options.init) options.init->end();
  keep_freed_host_memory();
  if (options.optimizer) {
    impl->client_optimizer = options.optimizer;
  } else {
    impl->optimizer = build_optimizer(config.optimizer, groups, impl->buckets, impl->masters, impl->parameter_infos,
                                      impl->plan.partition_optimizer, *impl->groups.shards, impl->offloaded.get());
    impl->reducer->keep_local(impl->optimizer->wants_local_gradients());
  }
  impl->plan.parameters = 0;
  for (const ParameterInfo& info : parameters.infos) *impl->plan.parameters += info.numel;
  predict_exactly(*impl, *impl->plan.parameters);
  if (impl->world->rank() == 0) say_what_runs(config, impl->plan);
  impl->schedule = make_schedule(options, config, *impl);
  if (impl->plan.loss_scaling != LossScaling::kNone) impl->loss_scaler.emplace(loss_scaler_options(config.fp16));
  impl->reporter = std::make_unique<Reporter>(config, impl->world->rank());
  impl->autocast = std::make_unique<Autocast>(
      impl->device.type(), impl->plan.autocast ? std::optional(scalar_type(*impl->plan.autocast)) : std::nullopt);
  impl->loader = make_loader(options, *impl);
  if (impl->pipeline) {
    impl->pipeline->runner = std::make_unique<pipeline::StageRunner>(
        *impl->pipeline->module, *impl->pipeline->ranks,
        pipeline::MessageOptions{.device = impl->device, .dynamic_shape = layers->options().dynamic_shape});
    if (impl->loader) require_equal_batches(*impl->pipeline, *impl->loader, "initialize: .training_data");
    training_schedule(*impl->pipeline, impl->plan, static_cast<int>(config.gradient_accumulation_steps));
  }

  impl->note_phase(Engine::Impl::Phase::kBetweenCalls);
  Initialized result{nullptr, impl->optimizer, impl->loader, impl->schedule};
  result.engine = std::make_shared<Engine>(std::move(impl));
  result.engine->reset_comm_counters();  // what counts is training
  return result;
}

}  // namespace ds::engine
