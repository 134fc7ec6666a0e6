// The program as the driver of steps: step(), and what belongs to an accumulation.
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/state/shared_buffers.h"
#include "parallel/axis/axis.h"

namespace ds::engine {

namespace {

// Once: what the first step has computed on joined tensors. Later ones are told by the axis.
void tell_of_joins(TensorParts& parts, int rank) {
  if (std::exchange(parts.told_of_joins, true)) return;
  parts.split.axis->tell_joins(true);
  std::string names;
  int64_t bytes = 0;
  for (const parallel::JoinedOperator& op : parts.split.joined_operators()) {
    names += cat(names.empty() ? "" : ", ", op.name, op.parameters.empty() ? "" : cat(" (of ", op.parameters, ")"));
    bytes += op.bytes;
  }
  if (rank != 0 || names.empty()) return;
  log::warning("tensor parallel: operators without a rule for split tensors were computed on joined ones, on every ",
               "rank: ", names, "; ", bytes, " bytes in the first step. The result is right, memory and time are ",
               "those of one rank. engine->joined_operators() has the list (said once)");
}

// What only the program can do, at its own place in forward, and has not.
void require_asked(const config::DsConfig& config, const Engine::Impl::Asked& asked, bool with_loader) {
  const auto demand = [&](bool enabled, bool done, const char* section, const char* call) {
    require(!enabled || done, section, " is enabled in ", config.source,
            ", and the program never asks for it: ", "expected a call of ", call,
            " before the first step (dsengine/efficiency.h); or turn the section off");
  };
  demand(config.curriculum_learning.enabled, asked.curriculum, "curriculum_learning", "engine::curriculum(engine)");
  demand(config.progressive_layer_drop.enabled, asked.layer_drop, "progressive_layer_drop",
         "engine::progressive_layer_drop(engine)");
  demand(config.data_efficiency.drops_tokens(), asked.token_drop, "data_efficiency.data_routing.random_ltd",
         "engine::random_ltd(engine)");
  demand(config.sparse_attention.has_value(), asked.sparse_attention, "sparse_attention",
         "engine::sparse_self_attention(engine, heads)");
  const auto& metrics = config.data_efficiency.data_sampling.curriculum_learning.metrics;
  const bool loader_does_all = with_loader && std::all_of(metrics.begin(), metrics.end(),
                                                          [](const efficiency::SampleMetric& m) { return m.chooses; });
  demand(config.data_efficiency.chooses_samples(), asked.data_sampler || loader_does_all,
         "data_efficiency.data_sampling",
         with_loader ? "engine::data_sampler(engine), for the difficulty of the metrics of single_cluster,"
                     : "engine::data_sampler(engine, size)");
}

}  // namespace

void Engine::name_batch(std::string name) { impl_->batches.name_next(std::move(name)); }

std::string Engine::Impl::with_engine(const std::string& message) const {
  const std::string own = state.gradients.reducer->engine_if_several();
  return own.empty() || message.find(own) != std::string::npos ? message : cat(message, " (", own, ")");
}

void Engine::step() {
  impl_->named([&] { impl_->step_once(); });
}

void Engine::Impl::step_once() {
  order.require_driver(Call::kStep);
  state.gradients.reducer->require_own_gradients("step()");  // why there was no backward(), perhaps
  order.require(Call::kStep);
  const bool boundary = order.micro_batches.at_boundary();
  if (boundary) {
    require_step("step()");  // before anything is counted: a step that is refused has not been
    show_gradients_to_compression();
  } else {
    warn_of_own_accumulation();
  }
  ++progress.micro_steps;
  order.micro_batches.note_micro_batch();
  progress.step_applied = false;
  if (boundary) {
    complete_step();
  } else {
    state.access->end_pass();
  }
}

void Engine::Impl::warn_of_own_accumulation() {
  const int64_t micro_batches = order.micro_batches.per_update();
  if (micro_batches == 1 || order.micro_batches.backwards_since_step() != micro_batches ||
      state.ranks.world->rank() != 0 || std::exchange(warned_of_own_accumulation, true))
    return;
  log::warning(
      with_engine("step()"), ": ", micro_batches, " backward() calls came before it, as many as ",
      "gradient_accumulation_steps says. Each step() counts one micro-batch, so that the update comes with the ",
      micro_batches, "th step(). A program that counts by itself sets gradient_accumulation_steps to 1; or it ",
      "calls step() after each backward() and leaves the counting to the engine (said once)");
}

void Engine::Impl::warn_of_no_value() const {
  constexpr int64_t kStepsWithout = 1000;
  if (progress.applied_steps != kStepsWithout || !schedule || state.ranks.world->rank() != 0) return;
  const auto plateau = schedule->plateau();
  if (!plateau || plateau->values > 0) return;
  log::warning("scheduler.type: ReduceLROnPlateau has been given no value in ", kStepsWithout,
               " steps, so that rates stay ",
               "as they are; call engine->lr_scheduler()->step(value) on all ranks with what you measure");
}

void Engine::Impl::require_step(const char* call) {
  require_asked(config, asked, loader != nullptr);
  watch->look(call);
  watch->look_at_module(call);
  require_freezing_possible(state);
  state.gradients.reducer->require_own_gradients(call);
  shown->require_untouched(call);
}

void Engine::Impl::complete_step(const at::Tensor& loss) {
  step->note_gradient_change(shown->take_back());
  const Phases::Scope phase(phases, "step");
  reporter->step_begins();
  const Autocast::Pause pause(state.ranks.device.type());
  step->late().read(/*judged_next=*/true);  // a step that was skipped goes back before what is noted here
  const int64_t samples =
      order.micro_batches.batches_done() * config.train_micro_batch_size_per_gpu * state.ranks.part->size();
  const Undo undo = {.micro_batches = order.micro_batches.end_accumulation(),
                     .samples = samples,
                     .optimizer_steps = state.optimizer.step_count()};
  ++progress.global_steps;
  progress.global_samples += samples;
  try {
    saves.background().wait_copied();
    step->run();
  } catch (const optimizers::LossScaleError&) {  // this step is over, and has been skipped
    state.access->end_pass();
    accumulation_begins();
    throw;
  } catch (const CommError&) {  // so is the job: nothing is left to wait for
    throw;
  } catch (...) {
    undo_accumulation(undo);
    throw;
  }
  state.access->end_pass();
  if (state.pipeline && state.ranks.groups.buffers) broadcast_buffers(*state.module, *state.ranks.groups.buffers);
  if (state.tensor) tell_of_joins(*state.tensor, state.ranks.world->rank());
  watch->renew();  // an optimizer of the program changes parameters in place
  if (progress.step_applied) {
    ++progress.applied_steps;
    if (schedule) schedule->step();
    warn_of_no_value();
  }
  accumulation_begins();
  const bool told = reporter->needs_numbers(progress.global_steps);
  if (told) step->late().read();
  reporter->step_ends({.state = state,
                       .progress = progress,
                       .micro_batches = undo.micro_batches,
                       .train_batch_size = samples,
                       .loss_scale = told ? accumulation->loss_scale() : 1.0,
                       .loss = told && loss.defined() ? loss.item<double>() : progress.loss});
}

void Engine::Impl::undo_accumulation(const Undo& undo) noexcept {
  progress.micro_steps -= undo.micro_batches;
  --progress.global_steps;
  progress.global_samples -= undo.samples;
  try {
    update->settle(Update::Next::kDrop);
    state.optimizer.go_back_to(undo.optimizer_steps);
    step->forget_gradient_changes();
    state.fp8->drop_step();
    accumulation->drop();
    state.access->end_pass();
    accumulation_begins(/*restarted=*/true);
  } catch (const std::exception& error) {  // what is thrown is the first failure
    log::error("after a step() that failed: ", error.what());
  }
}

bool Engine::is_gradient_accumulation_boundary() const { return impl_->order.micro_batches.at_boundary(); }

void Engine::set_gradient_accumulation_boundary(std::optional<bool> is_boundary) {
  impl_->order.micro_batches.set_boundary(is_boundary);
}

Engine::NoSync Engine::no_sync() { return NoSync(*this); }

Engine::NoSync::NoSync(Engine& engine) : engine_(engine) { engine_.impl_->order.scopes.begin_no_sync(); }

Engine::NoSync::~NoSync() { engine_.impl_->order.scopes.end_no_sync(); }

void Engine::zero_grad() {
  impl_->named([&] { impl_->drop_accumulation(); });
}

void Engine::Impl::drop_accumulation() {
  order.require(Call::kZeroGrad);
  // A program that does so in each micro-batch, as with torch's optimizers, would never come to a step.
  if (order.micro_batches.done() > 0 && !state.gradients.reducer->failed() && state.ranks.world->rank() == 0 &&
      !std::exchange(warned_of_zero_grad, true)) {
    log::warning(with_engine("zero_grad()"), " drops ", order.micro_batches.done(), " of ",
                 config.gradient_accumulation_steps, " micro-batches: the accumulation starts anew. step() clears the ",
                 "gradients itself; remove the call if this is not what you want (said once)");
  }
  // Of programs that call it first in each micro-batch, the batch has been taken from the loader by now.
  const bool had_begun = !order.micro_batches.at_start() || state.gradients.reducer->failed();
  shown->take_back();
  step->forget_gradient_changes();
  state.fp8->drop_step();
  accumulation->drop(/*unused=*/true);
  progress.micro_steps -= order.micro_batches.drop_accumulation();
  if (had_begun) accumulation_begins(/*restarted=*/true);
}

}  // namespace ds::engine
