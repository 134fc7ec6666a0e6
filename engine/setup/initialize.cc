// engine::initialize: the one place that puts the parts together, in the order of docs/design.md, section 5.
#include <torch/nn/module.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "checkpoint/block_checksum.h"
#include "comm/agreement.h"
#include "comm/job/error_stacks.h"
#include "config/plan/plan_choices.h"
#include "core/check.h"
#include "core/files/joined_file.h"
#include "core/listed.h"
#include "core/log.h"
#include "core/memory/host_memory.h"
#include "core/write_signals.h"
#include "dsengine/activation_checkpoint.h"
#include "dsengine/engine.h"
#include "dsengine/exported_model.h"
#include "dsengine/exported_pipeline.h"
#include "dsengine/lr_schedule.h"
#include "engine/engine_impl.h"
#include "engine/make_sampler.h"
#include "engine/setup/client_setup.h"
#include "engine/setup/fp8_setup.h"
#include "engine/setup/join_ranks.h"
#include "engine/setup/layer_setup.h"
#include "engine/setup/model_setup.h"
#include "engine/setup/optimizer_setup.h"
#include "engine/setup/row_wise_setup.h"
#include "engine/setup/seed.h"
#include "engine/setup/tensor_setup.h"
#include "layers/compressed/compressed_model.h"
#include "model/state/parameter_memory.h"
#include "model/state/part_options.h"
#include "model/state/recomputed_modules.h"
#include "model/state/same_on_all_ranks.h"
#include "model/state/shared_buffers.h"
#include "model/state/start_files.h"
#include "parallel/axis/axis.h"

namespace ds::engine {
namespace {

void say_what_runs(const config::DsConfig& config, const Plan& plan) {
  for (const std::string& warning : config.warnings) log::warning(warning);
  for (const config::ResolvedAuto& choice : config.resolved_auto) {
    log::info("auto: ", choice.path, " = ", choice.value.dump(), " (", choice.source, ")");
  }
  for (const std::string& warning : plan.warnings) log::warning(warning);
  if (config.dump_state) log::info("config:\n", config::to_json(config).dump(2));
  log::info("plan:\n", to_table(plan));
}

std::shared_ptr<LrScheduler> make_schedule(const InitializeOptions& options, const config::DsConfig& config,
                                           const ModelState& model) {
  const ModelOptimizer& optimizer = model.optimizer;
  if (options.torch_scheduler) {
    require<ConfigError>(optimizer.client != nullptr, "initialize: .torch_scheduler: expected the .optimizer that it ",
                         "was made over, found none; the optimizer of a ds_config has the section \"scheduler\"");
    require<ConfigError>(!options.lr_scheduler, "initialize: expected one of .lr_scheduler and .torch_scheduler, ",
                         "found both; remove one of them");
    return std::make_shared<LrScheduler>(optimizer.client, LrScheduler::of(options.torch_scheduler, optimizer.client));
  }
  if (!options.lr_scheduler && !config.scheduler.options) return nullptr;
  require<ConfigError>(optimizer.own || optimizer.client,
                       options.lr_scheduler ? "initialize: .lr_scheduler" : "scheduler",
                       ": expected none without an optimizer, whose learning rates it would set; add the section ",
                       "\"optimizer\", or remove this");
  LrScheduler::Rule rule;
  if (options.lr_scheduler) {
    rule = LrScheduler::scaled_by(options.lr_scheduler, optimizer.learning_rates());
  } else {
    std::vector<optimizers::GroupOptions> groups;
    if (!optimizer.client) {
      groups = optimizer.own->groups();
    } else {
      for (const double lr : optimizer.learning_rates()) groups.push_back({.lr = lr});
    }
    const bool betas = !optimizer.client && optimizer.own->traits().uses_betas;
    rule = LrScheduler::of(optimizers::make_lr_schedule(*config.scheduler.options, groups, betas));
  }
  auto schedule = optimizer.client ? std::make_shared<LrScheduler>(optimizer.client, std::move(rule))
                                   : std::make_shared<LrScheduler>(optimizer.own, std::move(rule));
  if (options.lr_scheduler) return schedule;
  if (const auto* plateau = std::get_if<optimizers::ReduceLrOnPlateauOptions>(&*config.scheduler.options)) {
    schedule->follow(*plateau, [world = model.ranks.world, device = model.ranks.device](double value) {
      return mean_of_ranks(value, device, *world, "values of lr_scheduler()->step(value)");
    });
  }
  schedule->load_last_batch_iteration(config.scheduler.last_batch_iteration);
  return schedule;
}

bool has_meta_tensors(const torch::nn::Module& module) {
  const auto is_meta = [](const at::Tensor& tensor) { return tensor.is_meta(); };
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  return std::any_of(parameters.begin(), parameters.end(), is_meta) ||
         std::any_of(buffers.begin(), buffers.end(), is_meta);
}

// All that must be the same on every rank beside the model: lines "what<TAB>value", see require_same_on_all_ranks().
std::string settings_text(const InitializeOptions& options, const config::DsConfig& config, const StartFiles& files,
                          const ModelParameters& parameters, const OptimizerGroups& groups) {
  std::string text = config_lines(config) + ema_lines(options.ema) + files.settings();
  const auto add = [&text](const auto&... parts) { text += cat(parts..., '\n'); };
  add("a client optimizer\t", options.optimizer ? optimizers::client_name(*options.optimizer) : "none");
  add(".init\t", options.init ? "given" : "none");
  add("layers of convert_sync_batchnorm without a group\t", layers_that_wait_for_ranks(*options.model));
  for (size_t i = 0; i < groups.group_of.size(); ++i) {
    add("the parameter group of ", i < parameters.trainable.size() ? parameters.trainable[i].name : cat(i), '\t',
        groups.group_of[i]);
  }
  text += group_lines(groups.options);
  for (size_t g = 0; g < groups.masks.size(); ++g) {
    if (!groups.masks[g].defined()) continue;
    const at::Tensor moves = groups.masks[g].ne(0).to(at::kCPU).contiguous();
    add("mask ", g, " of the parameter groups\t", moves.sizes(), " with the checksum ",
        checkpoint::checksum(moves.const_data_ptr(), moves.nbytes()));
  }
  return text;
}

void require_given(const InitializeOptions& options) {
  require(options.model != nullptr, "initialize: expected a model, found none; pass .model = model.ptr()");
  require<ConfigError>(!options.config.empty(), "initialize: expected a ds_config, found none; pass ",
                       ".config = \"ds_config.json\"");
  require_client(options);
}

PlanFacts plan_facts(const InitializeOptions& options, const config::DsConfig& config, const ModelState& model) {
  PlanFacts facts;
  const bool made_later = options.make_optimizer && !options.optimizer;
  facts.trains = options.optimizer || made_later || config.optimizer.given();
  facts.client_optimizer = options.optimizer || made_later;
  facts.client_on_slices = model.optimizer.client_states != nullptr || made_later;
  if (made_later) facts.client_name = "of .make_optimizer";
  if (options.optimizer) facts.client_name = optimizers::client_name(*options.optimizer);
  if (options.lr_scheduler) facts.given_schedule = ".lr_scheduler";
  if (options.torch_scheduler) facts.given_schedule = ".torch_scheduler";
  facts.accelerator = !model.ranks.device.is_cpu();
  facts.pipeline_module = pipeline_of(options) != nullptr;
  facts.seeds_generators = options.seed_generators;
  if (model.ranks.tensor) {
    facts.tensor_leaves_host = model.ranks.tensor_crossing;
    facts.tensor_inside_host = facts.tensor_leaves_host.empty();
    facts.pipe_inside_host = model.ranks.pipe_inside_host;
  }
  return facts;
}

// Config, ranks and plan: what runs where.
void choose_parts(Engine::Impl& impl, const InitializeOptions& options, bool one_stage) {
  config::DsConfig& config = impl.config;
  ModelState& model = impl.state;
  model.module = options.model;
  const Distributed job = join_ranks(options, config, one_stage);
  impl.phases.tell(job.ranks);
  impl.phases.note("initialize");
  if (config.log_level) log::set_level(*config.log_level);
  if (config.comms_logger.enabled) impl.comms.emplace(config.comms_logger, *job.ranks);  // before groups are made
  impl.cuts_sequences = options.cuts_sequences;
  model.ranks = place_ranks(job, options, config);
  if (impl.comms) impl.comms->observe_all_of(model.ranks);
  const bool is_pipeline = pipeline_of(options) != nullptr;
  model.optimizer = describe_client(options, config, model.ranks);
  model.plan = draft_plan(config, topology_of(model.ranks, job.ranks_per_host), plan_facts(options, config, model));
  require_compatible_client(model.optimizer, options, model.plan);
  if (options.ema != EmaOptions()) require_ema(model, options.ema);
  require<ConfigError>(model.plan.trains || options.parameter_groups.empty(),
                       "initialize: .parameter_groups: expected ",
                       "none without an optimizer; add the section \"optimizer\" to the ds_config, or remove them");
  const Driver driver = is_pipeline ? Driver::kSchedule : model.plan.trains ? Driver::kProgram : Driver::kNobody;
  impl.order = CallOrder(
      driver, {.micro_batches = config.gradient_accumulation_steps, .counted = config.managed_gradient_accumulation});
}

// Seeds, and what is one for the whole process or thread.
void configure_process(const InitializeOptions& options, const config::DsConfig& config, const Ranks& ranks) {
  if (options.seed_generators) seed_everything(static_cast<uint64_t>(config.seed), ranks.stream());
  if (config.deterministic) set_deterministic(true);
  if (config.float32_matmul_precision) set_float32_matmul_precision(*config.float32_matmul_precision);
  if (config.sdpa_backends) set_sdpa_backends(*config.sdpa_backends, ranks.device);
  // Without the section the program's own settings stay.
  if (!config.given("activation_checkpointing")) return;
  recompute::configure_checkpointing(
      checkpoint_options(config.activation_checkpointing, recompute::checkpoint_options()));
}

// Warns of the program's buffers whose values rank 0's are about to replace on other ranks. The layers of a pipeline
// have drawn theirs in initialize(), and are none of the program's doing. `from_file`: .weights may have others.
void tell_of_buffers(const ModelState& model, bool from_file) {
  comm::Communicator& ranks = *model.ranks.part;
  if (ranks.size() == 1 || model.pipeline) return;
  const std::vector<std::string> names = buffers_that_differ(*model.module, ranks, model.ranks.device);
  if (names.empty() || from_file || ranks.rank() != 0) return;
  log::warning(
      "initialize: the model's buffers differ between data ranks: ", listed(names, kMostBuffersNamed),
      ". All ranks go on with those of ",
      "rank 0, as with its parameters. State that each rank keeps for itself is set after initialize(); values ",
      "that are drawn at random have to be drawn alike");
}

// The module on its device: layers of a pipeline are built and .make_optimizer called; all else is moved as it is or,
// where it has no memory yet, later, bucket by bucket.
void place_module(ModelState& model, InitializeOptions& options, const config::DsConfig& config, StartFiles& files) {
  if (const auto layers = pipeline_of(options)) {
    require(!options.init, "initialize: .init: expected none with a pipeline::PipelineModule, which builds its layers ",
            "on the ranks that have them; remove it");
    model.pipeline = build_pipeline(layers, model.ranks.mesh->group(comm::MeshAxis::kPipe), config, model.plan,
                                    model.ranks.device, *model.ranks.world);
  }
  // Before anything moves: what shares memory would share it no more.
  if (model.plan.trains) require_own_memory(*options.model, "initialize", model.ranks.world->rank() == 0);
  set_up_compression(options, config, model.plan.pipeline.has_value(), model.ranks.tensor_ranks());
  const bool placed_later = options.init || has_meta_tensors(*options.model);
  if (!model.ranks.device.is_cpu() && !placed_later) options.model->to(model.ranks.device);
  if (model.pipeline) broadcast_tied_weights(model.pipeline->tied);
  tell_of_buffers(model, /*from_file=*/files.given());
  // Before the split: parameters in parts are no leaves, which torch's optimizers refuse.
  if (options.make_optimizer) make_client(model, options, config);
  model.tensor = model.ranks.tensor ? split_over_tensor_axis(model.ranks, options, config, files)
                                    : cut_over_sequence_axis(model.ranks, options, config, files);
}

OptimizerGroups groups_of(const ModelState& model, const InitializeOptions& options, const config::DsConfig& config,
                          const ModelParameters& parameters) {
  if (!options.optimizer && model.plan.trains) {
    const Ranks* const stages = model.plan.topology.pipe > 1 ? &model.ranks : nullptr;
    return plan_groups(config.optimizer, parameters, options.parameter_groups, stages);
  }
  if (model.optimizer.client_states) return client_groups(model.optimizer, parameters, *model.module);
  OptimizerGroups groups;
  groups.group_of.assign(parameters.trainable.size(), 0);
  return groups;
}

// What all ranks, and those with the same part of the model, have to bring alike.
void require_same_setup(const ModelState& model, const InitializeOptions& options, const config::DsConfig& config,
                        const std::string& settings, const ModelParameters& parameters) {
  const Ranks& ranks = model.ranks;
  if (model.plan.topology.pipe > 1) {
    const std::string layers =
        config_lines(config) + ema_lines(options.ema) + layers_text(*model.pipeline) + client_lines(model.optimizer);
    require_same_on_all_ranks({}, layers, {}, ranks.device, *ranks.world);
  }
  const auto samples = options.training_data ? std::optional(options.training_data.size()) : std::nullopt;
  require_same_on_all_ranks(parameters, settings,
                            {.samples = samples, .has_schedule = options.lr_scheduler || options.torch_scheduler},
                            ranks.device, *ranks.part);
}

// Begins the moving average of the weights, and says so in the plan.
void keep_average(ModelState& model, const EmaOptions& options) {
  model.average = std::make_unique<WeightAverage>(model, options);
  const auto mebibytes = [](int64_t bytes) { return fixed(static_cast<double>(bytes) / (1 << 20), 1); };
  const int64_t on_host = model.average->bytes(/*in_host_memory=*/true);
  Plan& plan = model.plan;
  plan.ema_bytes = model.average->bytes(/*in_host_memory=*/false);
  plan.rows.push_back(
      {"weight average",
       cat(mebibytes(plan.ema_bytes + on_host), " MiB per rank in ",
           plan.master_dtype == DType::kFloat64 ? "float64" : "float32",
           on_host > 0 ? cat(", ", mebibytes(on_host), " of it in host memory beside the masters") : std::string(),
           ", decay ", options.decay, options.warmup ? " at most, less at first" : ""),
       cat(".ema.decay: ", options.decay)});
}

// An exported model casts by dtypes that its file has baked (dsengine/exported_model.h).
void require_exported_dtypes(const torch::nn::Module& model, const config::DsConfig& config) {
  if (!config.bf16.enabled && !config.fp16.enabled) return;
  for (const auto& module : model.modules()) {
    const auto check = [&](const auto* exported) {
      if (exported && config.bf16.enabled) exported->require_dtype(at::kBFloat16, "bf16.enabled");
      if (exported && config.fp16.enabled) exported->require_dtype(at::kHalf, "fp16.enabled");
    };
    check(dynamic_cast<const ExportedModule*>(module.get()));
    check(dynamic_cast<const ExportedPipeline*>(module.get()));
  }
}

// Buckets, reductions and gathers with the start values, and the optimizer over them.
void build_model(ModelState& model, const InitializeOptions& options, const config::DsConfig& config,
                 StartFiles& files) {
  require_exported_dtypes(*options.model, config);
  ModelParameters parameters = collect_parameters(*options.model, model.plan.trains, model.tensor != nullptr);
  model.frozen_here = std::move(parameters.frozen_here);  // now: what fails below gives them back
  // Layers of a pipeline, and with them dtypes, are known only now.
  PlanFacts facts = plan_facts(options, config, model);
  add_dtypes(parameters, facts);
  if (model.tensor) add_splits(*model.tensor, parameters, facts);
  if (model.plan.topology.pipe > 1) require_one_precision(facts, model.ranks);
  complete_plan(config, facts, model.plan);
  const OptimizerGroups groups = groups_of(model, options, config, parameters);
  const std::vector<int64_t> row_widths = choose_row_wise_tables(model, parameters, groups);
  const std::string settings =
      settings_text(options, config, files, parameters, groups) + row_wise_lines(row_widths, parameters);
  require_same_setup(model, options, config, settings, parameters);
  if (config.fp8.enabled) require_fp8(model, config.fp8);
  model.ranks.groups = make_rank_groups(model.plan, model.ranks.part);
  return_freed_host_memory();  // start values of a bucket, between slices that stay, would leave holes
  StartValues values(*options.model, files, options.init, model.ranks);
  lay_out_model(model, config, parameters, groups.group_of, row_widths, values);
  set_up_batch_norms(model, config);
  choose_recomputed_modules(model, config);
  if (config.fp8.enabled) set_up_fp8(model, config.fp8);
  if (model.tensor) model.tensor->follow_leaves();
  if (options.init) options.init->end();
  keep_freed_host_memory();
  if (model.optimizer.client_states) {
    model.optimizer.own = build_client_optimizer(model);
  } else if (!options.optimizer && model.plan.trains) {
    model.optimizer.own = build_optimizer(model, config.optimizer, groups);
  }
  model.choose_gradients();
  predict_exactly(model, config);
  if (options.ema != EmaOptions()) keep_average(model, options.ema);
}

// What reports, scales and schedules beside the model.
void build_company(Engine::Impl& impl, const InitializeOptions& options, const ParityRun* parity) {
  const config::DsConfig& config = impl.config;
  const ModelState& model = impl.state;
  impl.schedule = make_schedule(options, config, model);
  if (model.plan.loss_scaling != LossScaling::kNone) impl.loss_scaler.emplace(loss_scaler_options(config));
  impl.reporter = std::make_unique<Reporter>(config, model);
  impl.inputs.emplace(model.ranks.device);
  impl.autocast = std::make_unique<Autocast>(model.ranks.device.type(), scalar_type(model.plan.autocast));
  if (options.training_data) {
    const int64_t samples = options.training_data.size();
    impl.sampler = parity ? parity->sampler(config, impl.sampler_place(), samples, options.loading.order)
                          : make_sampler(config, impl.sampler_place(), samples, options.loading.order);
    impl.loader = make_loader(config, impl.sampler_place(), options, impl.sampler, model.ranks.device);
  }
}

void prepare_schedule(Engine::Impl& impl) {
  if (!impl.state.plan.pipeline) return;
  PipelineState& pipeline = *impl.state.pipeline;
  const MessageCuts cuts = choose_message_cuts(impl.config, impl.state.plan, impl.state.ranks.pipe_inside_host);
  pipeline.runner = std::make_unique<pipeline::StageRunner>(
      *pipeline.module, *pipeline.ranks,
      pipeline::MessageOptions{.device = impl.state.ranks.device,
                               .dynamic_shape = pipeline.module->options().dynamic_shape,
                               .axis = impl.state.tensor ? impl.state.tensor->split.axis : nullptr,
                               .axis_ranks = impl.state.ranks.tensor,
                               .cut_activations = cuts.activations,
                               .cut_gradients = cuts.gradients});
  if (impl.loader) require_equal_batches(pipeline, *impl.loader, "initialize: .training_data");
  training_schedule(pipeline, impl.state.plan, static_cast<int>(impl.config.gradient_accumulation_steps));
}

// Ranks update where their own slices are, perhaps some of them on the host: how a step is judged is one for all.
bool all_may_judge_late(const Engine::Impl& impl) {
  const Ranks& ranks = impl.state.ranks;
  if (ranks.device.is_cpu()) return false;
  const auto compressed = model_compression::find_model(*impl.state.module);
  const bool looks_at_gradients = compressed && compressed->follows_gradients();  // of steps that are made alone
  const int64_t may_not = impl.update->takes_device_scale() && !looks_at_gradients ? 0 : 1;
  return largest_of_ranks(may_not, ranks.device, *ranks.world, "steps that are judged late") == 0;
}

void build_steps(Engine::Impl& impl) {
  impl.watch.emplace(impl.state, impl.saves.background());
  impl.update = make_update({.state = impl.state,
                             .consistency = impl.order.consistency,
                             .progress = impl.progress,
                             .saving = impl.saves.background()});
  impl.scaled_backward.emplace(ScaledBackwardDeps{.state = impl.state,
                                                  .update = *impl.update,
                                                  .order = impl.order,
                                                  .progress = impl.progress,
                                                  .loss_scaler = impl.loss_scaler,
                                                  .batches = impl.batches});
  const bool by_default = impl.config.non_finite_gradients == config::NonFiniteGradients::kAuto;
  const ModelOptimizer& optimizer = impl.state.optimizer;
  const int64_t groups = optimizer.own ? static_cast<int64_t>(optimizer.own->groups().size()) : 0;
  const bool one_group =
      impl.state.pipeline_ranks() == 1 || largest_of_ranks(groups, impl.state.ranks.device, *impl.state.ranks.world,
                                                           "the number of parameter groups of the stages") <= 1;
  impl.settings.emplace(StepSettingsDeps{.state = impl.state,
                                         .progress = impl.progress,
                                         .micro_batches = impl.order.micro_batches,
                                         .loss_scaler = impl.loss_scaler,
                                         .schedule = impl.schedule,
                                         .counts = impl.scaled_backward->counts(),
                                         .one_group = one_group});
  impl.step.emplace(OptimizerStepDeps{.state = impl.state,
                                      .update = *impl.update,
                                      .scaled_backward = *impl.scaled_backward,
                                      .consistency = impl.order.consistency,
                                      .progress = impl.progress,
                                      .loss_scaler = impl.loss_scaler,
                                      .watch = *impl.watch,
                                      .reporter = *impl.reporter,
                                      .data = {impl.batches, impl.loader, impl.sampler, impl.shared_batches},
                                      .settings = *impl.settings,
                                      .schedule = impl.schedule,
                                      .judged_by_default = by_default,
                                      .may_judge_late = all_may_judge_late(impl)});
  impl.shown.emplace(impl.state);
}

// `parity`: the run of `ds-launch parity` that the engine is made for; null: none. .make_optimizer gives the optimizer.
Initialized put_together(InitializeOptions options, const ParityRun* parity) {
  hide_error_stacks();
  let_writes_fail({SIGXFSZ});
  note_joined();  // also where the program brings its own group
  require_given(options);
  auto impl = std::make_unique<Engine::Impl>();
  choose_parts(*impl, options, /*one_stage=*/parity != nullptr && parity->is_reference());
  configure_process(options, impl->config, impl->state.ranks);
  StartFiles files(
      {.weights = options.weights, .match = options.weights_options, .seed = static_cast<uint64_t>(impl->config.seed)});
  place_module(impl->state, options, impl->config, files);
  build_model(impl->state, options, impl->config, files);
  impl->start_weights = files.report();
  impl->replicas.emplace(impl->state, impl->order.consistency, impl->config.check_replicas);
  impl->replicas->add_row(impl->state.plan);
  if (impl->state.ranks.world->rank() == 0) say_what_runs(impl->config, impl->state.plan);
  build_company(*impl, options, parity);
  prepare_schedule(*impl);
  build_steps(*impl);
  impl->accumulation_begins();
  impl->phases.note(Phases::kBetweenCalls);
  if (impl->comms) impl->comms->begin();
  impl->reporter->step_comes(impl->progress.global_steps);
  Initialized result{nullptr, impl->state.optimizer.of_config(), impl->loader, impl->schedule};
  result.engine = std::make_shared<Engine>(std::move(impl));
  result.engine->reset_comm_counters();  // what counts is training
  return result;
}

}  // namespace

Initialized initialize(const InitializeOptions& options) {
  const std::optional<ParityRun> parity = ParityRun::from_environment();
  if (!parity) return put_together(options, nullptr);
  InitializeOptions of_run = options;
  of_run.config = parity->config();
  Initialized result = put_together(of_run, &*parity);
  Engine::Impl& impl = EngineAccess::impl_of(*result.engine);
  impl.parity = std::make_unique<ParityRecord>(*parity, impl.state, impl.progress, impl.config);
  impl.parity->start(*result.engine);
  return result;
}

}  // namespace ds::engine
