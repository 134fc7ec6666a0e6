// The program as the driver of steps: backward() and step(), and what belongs to an accumulation.
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "core/tensor_check.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "engine/update/held_still.h"

namespace ds::engine {

void Engine::name_batch(std::string name) { impl_->batches.name_next(std::move(name)); }

at::Tensor Engine::backward(const at::Tensor& loss, bool retain_graph, bool scale_wrt_gas) {
  Impl& self = *impl_;
  self.order.require_driver(Call::kBackward);
  require(loss.defined() && loss.numel() == 1, "backward: expected a scalar loss, found ", describe(loss),
          "; reduce it first, for example with loss.mean()");
  require(loss.requires_grad(),
          "backward: the loss has no graph: expected a tensor computed from trainable parameters, found ",
          describe(loss), " that does not require a gradient (computed under NoGradGuard, or all parameters frozen?)");
  self.order.require(Call::kBackward);
  self.update->settle(Update::Next::kBackward);
  self.watch->look("backward()");
  const Phases::Scope phase(self.phases, "backward");
  self.reporter->backward_begins();
  const Autocast::Pause pause(self.state.ranks.device.type());
  const bool boundary = self.order.boundary_is_known() && self.order.at_boundary();
  const at::Tensor averaged = scale_wrt_gas ? self.accumulation->averaged(loss) : loss;
  const at::Tensor scaled = self.accumulation->scaled(averaged);
  const int64_t micro_batch = self.order.micro_batches_done();
  self.batches.begin(micro_batch, self.loader.get());
  const double share = scale_wrt_gas ? 1.0 / static_cast<double>(self.order.micro_batches_of_update()) : 1.0;
  self.batches.keep_loss(micro_batch, loss.detach(), share);
  self.accumulation->begin_micro_batch(micro_batch);
  self.state.gradients.reducer->require_own_gradients("backward()");
  self.shown->require_untouched("backward()");
  self.shown->take_back();
  self.accumulation->run(boundary, [&] { scaled.backward({}, retain_graph); });
  self.order.backward_done();
  using After = ShownGradients::After;
  const After pass = !self.order.at_boundary()                    ? After::kPart
                     : boundary && self.order.synchronizes() ? After::kLastGradient
                                                             : After::kUnreduced;
  self.shown->show(pass, self.accumulation->loss_scale());
  self.reporter->backward_ends();
  return averaged.detach();
}

void Engine::step() {
  Impl& self = *impl_;
  self.order.require(Call::kStep);
  const bool boundary = self.order.at_boundary();
  if (!boundary) self.warn_of_own_accumulation();
  ++self.progress.micro_steps;
  self.order.micro_batch_done();
  self.progress.step_applied = false;
  if (!boundary) {
    self.state.access->end_pass();
    return;
  }
  self.complete_step();
}

void Engine::Impl::warn_of_own_accumulation() {
  const int64_t micro_batches = order.micro_batches_of_update();
  if (micro_batches == 1 || order.backwards_since_step() != micro_batches || state.ranks.world->rank() != 0 ||
      std::exchange(warned_of_own_accumulation, true))
    return;
  log::warning("step(): ", micro_batches, " backward() calls came before it, as many as gradient_accumulation_steps ",
               "says. Each step() counts one micro-batch, so that the update comes with the ", micro_batches,
               "th step(). A program that counts by itself sets gradient_accumulation_steps to 1; or it calls step() ",
               "after each backward() and leaves the counting to the engine (said once)");
}

void Engine::Impl::complete_step(const at::Tensor& loss) {
  watch->look("step()");
  watch->look_at_module("step()");
  HeldStill::require_possible(state);
  state.gradients.reducer->require_own_gradients("step()");
  shown->require_untouched("step()");
  shown->take_back();
  const Phases::Scope phase(phases, "step");
  reporter->step_begins();
  const Autocast::Pause pause(state.ranks.device.type());
  const int64_t micro_batches = order.end_accumulation();
  const int64_t optimizer_steps = state.optimizer.step_count();
  ++progress.global_steps;
  progress.global_samples += config.train_batch_size;
  try {
    step->run();
  } catch (const optimizers::LossScaleError&) {  // this step is over, and has been skipped
    state.access->end_pass();
    throw;
  } catch (const CommError&) {  // so is the job: nothing is left to wait for
    throw;
  } catch (...) {
    undo_accumulation(micro_batches, optimizer_steps);
    throw;
  }
  state.access->end_pass();
  watch->renew();  // an optimizer of the program changes parameters in place
  if (progress.step_applied) {
    ++progress.applied_steps;
    if (schedule) schedule->step();
  }
  reporter->step_ends({.state = state,
                       .progress = progress,
                       .train_batch_size = config.train_batch_size,
                       .loss_scale = accumulation->loss_scale(),
                       .loss = loss.defined() ? loss.item<double>() : progress.loss});
}

void Engine::Impl::undo_accumulation(int64_t micro_batches, int64_t optimizer_steps) noexcept {
  progress.micro_steps -= micro_batches;
  --progress.global_steps;
  progress.global_samples -= config.train_batch_size;
  try {
    update->settle(Update::Next::kDrop);
    state.optimizer.go_back_to(optimizer_steps);
    accumulation->drop();
    state.access->end_pass();
  } catch (const std::exception& error) {  // what is thrown is the first failure
    log::error("after a step() that failed: ", error.what());
  }
}

bool Engine::is_gradient_accumulation_boundary() const { return impl_->order.at_boundary(); }

void Engine::set_gradient_accumulation_boundary(std::optional<bool> is_boundary) {
  impl_->order.set_boundary(is_boundary);
}

Engine::NoSync Engine::no_sync() { return NoSync(*this); }

Engine::NoSync::NoSync(Engine& engine) : engine_(engine) { engine_.impl_->order.begin_no_sync(); }

Engine::NoSync::~NoSync() { engine_.impl_->order.end_no_sync(); }

void Engine::zero_grad() {
  Impl& self = *impl_;
  self.order.require(Call::kZeroGrad);
  // A program that does so in each micro-batch, as with torch's optimizers, would never come to a step.
  if (self.order.micro_batches_done() > 0 && !self.state.gradients.reducer->failed() && global_rank() == 0 &&
      !std::exchange(self.warned_of_zero_grad, true)) {
    log::warning("zero_grad() drops ", self.order.micro_batches_done(), " of ", gradient_accumulation_steps(),
                 " micro-batches: the accumulation starts anew. step() clears the gradients itself; remove the call ",
                 "if this is not what you want (said once)");
  }
  self.shown->take_back();
  self.step->forget_clip();
  self.accumulation->drop(/*unused=*/true);
  self.progress.micro_steps -= self.order.drop_accumulation();
}

}  // namespace ds::engine
