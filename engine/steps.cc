// The program as the driver of steps: step(), and what belongs to an accumulation.
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/without_stack.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/state/shared_buffers.h"
#include "parallel/axis/axis.h"

namespace ds::engine {

namespace {

// Warns once of what the first step has computed on joined tensors. The axis tells later ones.
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

// Throws UsageError where the config enables what only the program can do, at its own place in forward, and it has not.
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

// Warns, once, when as many backward() calls as an accumulation has micro-batches came before one step() inside of it.
void warn_of_own_accumulation(Engine::Impl& engine) {
  const int64_t micro_batches = engine.order.micro_batches.per_update();
  if (micro_batches == 1 || engine.order.micro_batches.backwards_since_step() != micro_batches ||
      engine.state.ranks.world->rank() != 0 || std::exchange(engine.warned_of_own_accumulation, true))
    return;
  log::warning(
      engine.with_engine("step()"), ": ", micro_batches, " backward() calls came before it, as many as ",
      "gradient_accumulation_steps says. Each step() counts one micro-batch, so that the update comes with the ",
      micro_batches, "th step(). A program that counts by itself sets gradient_accumulation_steps to 1; or it ",
      "calls step() after each backward() and leaves the counting to the engine (said once)");
}

// Warns, once, of an update of fewer micro-batches than their losses were divided by, as at the end of an epoch where
// the program declares the boundary.
void warn_of_short_update(Engine::Impl& engine) {
  const int64_t asked = engine.order.micro_batches.per_update();
  const int64_t done = engine.order.micro_batches.batches_done();
  if (done >= asked || !engine.divides_loss || engine.state.ranks.world->rank() != 0 ||
      std::exchange(engine.warned_of_short_update, true))
    return;
  log::warning(engine.with_engine("step()"), ": the update is made of ", done, " of ", asked,
               " micro-batches, and the loss of each was divided by ", asked, ": its gradient is ", done, "/", asked,
               " of that of their mean. If the mean is meant, divide these losses by ", done,
               " and pass scale_wrt_gas = false to their backward() (said once)");
}

// Warns, once, of a ReduceLROnPlateau schedule that has been given no value to follow in many steps.
void warn_of_no_value(const Engine::Impl& engine) {
  constexpr int64_t kStepsWithout = 1000;
  if (engine.progress.applied_steps != kStepsWithout || !engine.schedule || engine.state.ranks.world->rank() != 0) {
    return;
  }
  const auto plateau = engine.schedule->plateau();
  if (!plateau || plateau->values > 0) return;
  log::warning("scheduler.type: ReduceLROnPlateau has been given no value in ", kStepsWithout,
               " steps, so that rates stay ",
               "as they are; call engine->lr_scheduler()->step(value) on all ranks with what you measure");
}

// The counts of one step, by which undo_accumulation() takes it back.
struct StepCounts {
  int64_t micro_batches = 0;    // of the accumulation
  int64_t samples = 0;          // of the accumulation, on all ranks
  int64_t optimizer_steps = 0;  // before the update
};

// Takes an accumulation back whose update threw, as if it had not been.
void undo_accumulation(Engine::Impl& engine, const StepCounts& counts) noexcept {
  engine.progress.micro_steps -= counts.micro_batches;
  --engine.progress.global_steps;
  engine.progress.global_samples -= counts.samples;
  try {
    engine.update->settle(Update::Next::kDrop);
    engine.state.optimizer.go_back_to(counts.optimizer_steps);
    engine.step->forget_gradient_changes();
    engine.state.fp8->drop_step();
    engine.scaled_backward->drop();
    engine.state.access->end_pass();
    engine.accumulation_begins(/*restarted=*/true);
  } catch (const std::exception& error) {  // what is thrown is the first failure
    log::error("after a step() that failed: ", without_stack(error.what()));
  }
}

// Drops the running accumulation, because the program asks for it by zero_grad().
void drop_accumulation(Engine::Impl& engine) {
  const ModelState& state = engine.state;
  MicroBatchCounter& counter = engine.order.micro_batches;
  engine.order.require(Call::kZeroGrad);
  // A program that does so in each micro-batch, as with torch's optimizers, would never come to a step.
  if (counter.done() > 0 && !state.gradients.reducer->failed() && state.ranks.world->rank() == 0 &&
      !std::exchange(engine.warned_of_zero_grad, true)) {
    log::warning(engine.with_engine("zero_grad()"), " drops ", counter.done(), " of ",
                 engine.config.gradient_accumulation_steps, " micro-batches: the accumulation starts anew. step() ",
                 "clears the gradients itself; remove the call if this is not what you want (said once)");
  }
  // A program that calls it first in each micro-batch has taken the batch from the loader by now.
  const bool had_begun = !counter.at_start() || state.gradients.reducer->failed();
  engine.shown->take_back();
  engine.step->forget_gradient_changes();
  state.fp8->drop_step();
  engine.scaled_backward->drop(/*unused=*/true);
  engine.progress.micro_steps -= counter.drop_accumulation();
  if (had_begun) engine.accumulation_begins(/*restarted=*/true);
}

}  // namespace

void Engine::name_batch(std::string name) { impl_->batches.name_next(std::move(name)); }

std::string Engine::Impl::with_engine(const std::string& message) const {
  const std::string own = state.gradients.reducer->neighbours().engine_if_several();
  return own.empty() || message.find(own) != std::string::npos ? message : cat(message, " (", own, ")");
}

void Engine::step() {
  impl_->named([&] {
    if (impl_->parity) impl_->parity->before_step(*this);
    impl_->make_step();
    if (impl_->parity) impl_->parity->after_step(*this);
  });
  impl_->reporter->trace_step(impl_->progress.global_steps);
}

void Engine::Impl::make_step() {
  order.require_driver(Call::kStep);
  state.gradients.reducer->neighbours().require_no_gradients("step()");  // why there was no backward(), perhaps
  order.require(Call::kStep);
  const bool boundary = order.micro_batches.at_boundary();
  if (boundary) {
    require_step("step()");  // before anything is counted: a step that is refused has not been
    show_gradients_to_compression();
  } else {
    warn_of_own_accumulation(*this);
  }
  ++progress.micro_steps;
  order.micro_batches.note_micro_batch();
  progress.step_applied = false;
  if (boundary) {
    warn_of_short_update(*this);
    complete_step();
  } else {
    state.access->end_pass();
  }
}

void Engine::Impl::require_step(const char* call) {
  require_asked(config, asked, loader != nullptr);
  watch->look(call);
  watch->look_at_module(call);
  require_freezing_possible(state);
  state.gradients.reducer->neighbours().require_no_gradients(call);
  shown->require_untouched(call);
}

void Engine::Impl::complete_step(const at::Tensor& loss) {
  step->note_gradient_change(shown->take_back());
  const Phases::Scope phase(phases, "step");
  reporter->step_begins();
  const Autocast::Pause pause(state.ranks.device.type());
  step->late().read(/*judged_next=*/true);  // a step that was skipped goes back before what is noted here
  const int64_t samples =
      order.micro_batches.batches_done() * config.train_micro_batch_size_per_gpu * state.ranks.data->size();
  const StepCounts counts = {.micro_batches = order.micro_batches.end_accumulation(),
                             .samples = samples,
                             .optimizer_steps = state.optimizer.step_count()};
  ++progress.global_steps;
  progress.global_samples += samples;
  try {
    saves.background().wait_copied();
    replicas->judge();
    step->run();
  } catch (const optimizers::LossScaleError&) {  // this step is over, and has been skipped
    state.access->end_pass();
    accumulation_begins();
    throw;
  } catch (const CommError&) {  // so is the job: nothing is left to wait for
    throw;
  } catch (...) {
    undo_accumulation(*this, counts);
    throw;
  }
  state.access->end_pass();
  if (state.pipeline && state.ranks.groups.buffers) broadcast_buffers(*state.module, *state.ranks.groups.buffers);
  if (state.pipeline) replicas->note_backward(/*buffers_shared=*/true);
  if (state.tensor) tell_of_joins(*state.tensor, state.ranks.world->rank());
  watch->renew();  // an optimizer of the program changes parameters in place
  settings->note_states();
  if (progress.step_applied) {
    ++progress.applied_steps;
    try {
      if (schedule) schedule->step();
    } catch (...) {  // the step is made all the same
      accumulation_begins();
      throw;
    }
    warn_of_no_value(*this);
  }
  accumulation_begins();
  const bool told = reporter->needs_numbers(progress.global_steps);
  if (told) step->late().read();
  reporter->step_ends({.state = state,
                       .progress = progress,
                       .micro_batches = counts.micro_batches,
                       .train_batch_size = samples,
                       .loss_scale = told ? scaled_backward->loss_scale() : 1.0,
                       .loss = told && loss.defined() ? loss.item<double>() : progress.loss,
                       .tokens = told ? step->late().tokens() : 0.0});
  replicas->step_made(progress.global_steps);
  reporter->write_logged(progress.global_steps);
}

bool Engine::is_gradient_accumulation_boundary() const { return impl_->order.micro_batches.at_boundary(); }

void Engine::set_gradient_accumulation_boundary(std::optional<bool> is_boundary) {
  impl_->order.micro_batches.set_boundary(is_boundary);
}

Engine::NoSync Engine::no_sync() { return NoSync(*this); }

Engine::NoSync::NoSync(Engine& engine) : engine_(engine) { engine_.impl_->order.scopes.begin_no_sync(); }

Engine::NoSync::~NoSync() { engine_.impl_->order.scopes.end_no_sync(); }

void Engine::zero_grad() {
  impl_->named([&] { drop_accumulation(*impl_); });
}

}  // namespace ds::engine
