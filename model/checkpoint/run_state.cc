#include "model/checkpoint/run_state.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <vector>

#include "core/check.h"
#include "core/log.h"

namespace ds::engine {
namespace {

// Returns the model's dtype as torch writes it.
std::string precision_of(const ModelState& model) {
  switch (model.plan.model_dtype) {
    case config::DType::kFloat16:
      return "float16";
    case config::DType::kBFloat16:
      return "bfloat16";
    case config::DType::kFloat64:
      return "float64";
    default:
      return "float32";
  }
}

// Says which options of a group the checkpoint has otherwise than the config, or the program. What a schedule sets is
// left out where there is one.
void tell_changes(size_t group, const optimizers::GroupOptions& saved, const optimizers::GroupOptions& own,
                  bool follows_schedule) {
  struct Option {
    const char* name;
    double optimizers::GroupOptions::*value;
    bool scheduled = false;
  };
  static constexpr Option kOptions[] = {{"lr", &optimizers::GroupOptions::lr, true},
                                        {"weight_decay", &optimizers::GroupOptions::weight_decay},
                                        {"beta1", &optimizers::GroupOptions::beta1, true},
                                        {"beta2", &optimizers::GroupOptions::beta2},
                                        {"momentum", &optimizers::GroupOptions::momentum, true},
                                        {"eps", &optimizers::GroupOptions::eps}};
  std::string changes;
  for (const Option& option : kOptions) {
    if ((option.scheduled && follows_schedule) || saved.*option.value == own.*option.value) continue;
    changes +=
        cat(changes.empty() ? "" : ", ", option.name, " ", saved.*option.value, " (not ", own.*option.value, ")");
  }
  if (changes.empty()) return;
  log::info("load_checkpoint: parameter group ", group, " has from the checkpoint, not from here: ", changes,
            "; change them after load_checkpoint(), if that is meant");
}

void take_groups(const ModelState& model, const checkpoint::OptimizerState& saved, bool follows_schedule) {
  model.optimizer.own->set_step_count(saved.step_count);
  const std::vector<optimizers::GroupOptions> groups = model.optimizer.group_options();
  const bool says = model.ranks.world->rank() == 0;
  if (saved.groups.size() != groups.size()) {
    if (says) {
      log::warning("load_checkpoint: the checkpoint has ", saved.groups.size(), " parameter groups, the engine ",
                   groups.size(), ": learning rates and other options of the groups stay as they are");
    }
    return;
  }
  for (size_t i = 0; says && i < groups.size(); ++i) tell_changes(i, saved.groups[i], groups[i], follows_schedule);
  model.optimizer.set_group_options(saved.groups);
}

void take_plateau(const ModelState& model, LrScheduler& schedule, const checkpoint::Source& source) {
  if (!schedule.plateau()) return;
  schedule.load_plateau(source.state().plateau.value_or(optimizers::PlateauState()));
  if (source.state().plateau) return;
  if (model.ranks.world->rank() == 0) {
    log::warning("load_checkpoint: ", source.location(), " has no values of ReduceLROnPlateau: it begins anew");
  }
}

void take_over_states(const ModelState& model, bool with_rank_states) {
  model.optimizer.own->states_changed(with_rank_states);
  if (!model.plan.error_feedback) return;
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < model.buckets.size(); ++b) {  // where ranks step by themselves
    const at::Tensor weights = model.optimizer.weights(b, model.masters[b]);
    if (weights.is_same(model.masters[b])) continue;
    at::Tensor(model.buckets[b].flat()).copy_(weights);
  }
}

void take_position(BatchSampler& sampler, const checkpoint::DataPosition& saved, const std::string& location) {
  try {
    sampler.load_state(
        {.epoch = saved.epoch, .next_sample = saved.next_sample, .seed = saved.seed, .curriculum = saved.curriculum});
  } catch (const UsageError& error) {  // other data than the run had that saved, so its position means nothing
    log::warning("load_checkpoint: ", location, ": the training data begins anew: ", error.what());
  }
}

}  // namespace

AccumulationStart accumulation_start(const ModelState& model, const BatchSampler* sampler) {
  return {.data = sampler ? std::optional(sampler->state()) : std::nullopt, .generators = generator_states(model)};
}

checkpoint::TrainingState training_state(const ModelState& model, const RunState& run,
                                         const nlohmann::json& client_state) {
  checkpoint::TrainingState state;
  state.global_steps = run.progress.global_steps;
  state.global_samples = run.progress.global_samples;
  state.micro_steps = run.progress.micro_steps - run.unfinished_micro_batches;
  state.skipped_steps = run.progress.skipped_steps();
  state.world_size = model.ranks.world->size();
  state.pipeline_stages = model.pipeline_ranks();
  state.tensor_ranks = model.ranks.tensor_ranks();
  state.zero_stage = static_cast<int>(run.config.zero_optimization.stage);
  state.precision = precision_of(model);
  if (const auto& own = model.optimizer.own) {
    state.optimizer = {.type = own->name(), .step_count = own->step_count(), .groups = model.optimizer.group_options()};
  } else if (model.optimizer.client) {
    state.optimizer = client_optimizer_state(*model.optimizer.client);
  }
  if (model.average) state.ema_updates = model.average->updates();
  if (run.loss_scaler) state.loss_scaler = run.loss_scaler->state();
  if (run.schedule) {
    state.lr_iteration = run.schedule->last_batch_iteration();
    state.plateau = run.schedule->plateau();
  }
  if (run.sampler) {
    const SamplerState position = run.start && run.start->data ? *run.start->data : run.sampler->state();
    state.data = {.epoch = position.epoch,
                  .next_sample = position.next_sample,
                  .seed = position.seed,
                  .curriculum = position.curriculum};
  }
  state.config = nlohmann::json(run.config.text);
  state.client_state = client_state;
  return state;
}

void take_run_state(const ModelState& model, const RunState& run, const checkpoint::Source& source,
                    const TakenStates& taken) {
  const checkpoint::TrainingState& state = source.state();
  run.progress.global_steps = state.global_steps;
  run.progress.global_samples = state.global_samples;
  run.progress.applied_steps = state.global_steps - state.skipped_steps;
  run.progress.step_applied = false;
  run.progress.gradient_norm.reset();
  run.progress.micro_steps = state.micro_steps;
  if (!state.run.empty()) run.progress.run = state.run;
  if (run.loss_scaler && run.loss_scaler->dynamic() && state.loss_scaler) run.loss_scaler->load(*state.loss_scaler);
  // The checkpoint's FP8 scales of gradients fit the loss scale that was saved.
  const double saved = state.loss_scaler ? state.loss_scaler->scale : 1.0;
  model.fp8->gradients_scaled((run.loss_scaler ? run.loss_scaler->scale() : 1.0) / saved);
  if (taken.with_optimizer && model.optimizer.own && state.optimizer) {
    take_groups(model, *state.optimizer, /*follows_schedule=*/run.schedule != nullptr && !run.schedule->plateau());
    take_over_states(model, taken.with_rank_states);
  }
  if (run.schedule) {  // also where it stays: its values are those of the groups, not the checkpoint's
    const int64_t own = run.schedule->last_batch_iteration();
    if (taken.with_schedule && !state.lr_iteration && !run.schedule->plateau() && run.progress.applied_steps > 0 &&
        model.ranks.world->rank() == 0) {
      log::warning("load_checkpoint: ", source.location(), " has ", run.progress.applied_steps, " steps and no place ",
                   "of a learning-rate schedule, which stays at its step ", own + 1, ". To put it elsewhere, call ",
                   "engine->lr_scheduler()->load_last_batch_iteration(steps - 1)");
    }
    run.schedule->load_last_batch_iteration(taken.with_schedule ? state.lr_iteration.value_or(own) : own);
    if (taken.with_schedule) take_plateau(model, *run.schedule, source);
  }
  if (!run.sampler) return;
  if (state.data) {
    take_position(*run.sampler, *state.data, source.location());
  } else if (run.sampler->state().curriculum && model.ranks.world->rank() == 0) {
    log::warning("load_checkpoint: ", source.location(), " has no position in the training data: the curriculum of ",
                 "samples goes on from where it is, at step ", run.sampler->state().curriculum->batches + 1);
  }
}

}  // namespace ds::engine
