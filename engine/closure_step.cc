// step(closure): an optimizer of the program that computes the loss several times inside of its step, as LBFGS.
#include <ATen/core/grad_mode.h>

#include <functional>
#include <utility>

#include "core/check.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/state/finished_gradients.h"

namespace ds::engine {
namespace {

void require_possible(const Engine::Impl& impl) {
  const Plan& plan = impl.state.plan;
  require(impl.state.optimizer.steps_on_parameters(), "step(closure): expected an optimizer of the program that steps ",
          "on whole parameters, as torch::optim::LBFGS, found ", impl.state.optimizer.name(),
          "; call engine->step() after engine->backward(loss). An optimizer of the program that asks for the loss ",
          "several times in a step works at zero_optimization.stage 0 in float32 alone");
  const auto require_off = [](bool off, const char* key, const char* found) {
    require(off, "step(closure): ", key, ": expected ", found, ", because the optimizer asks for the loss and its ",
            "gradient as they are, several times in a step");
  };
  require_off(plan.clip_norm == 0 && plan.clip_value == 0, "gradient_clipping", "0");
  require_off(impl.order.micro_batches.per_update() == 1, "gradient_accumulation_steps", "1");
  require_off(!plan.autocast, "torch_autocast.enabled", "false");
  require_off(plan.topology.sequence == 1, "sequence_parallel_size", "1");
}

// The mean of the loss over all ranks.
at::Tensor mean_loss(const at::Tensor& loss, const Ranks& ranks) {
  require(loss.defined() && loss.numel() == 1, "step(closure): expected that the closure returns the loss that it has ",
          "given to engine->backward(), a scalar");
  const at::NoGradGuard no_grad;
  const at::Tensor mean = loss.detach().to(ranks.device).reshape({1}).clone();
  if (ranks.part->size() > 1) ranks.part->all_reduce(mean, comm::ReduceOp::kAvg, "loss of a closure").wait();
  return mean.squeeze();
}

// Has the closure make gradients, and returns the loss that it computes, the mean of all ranks.
at::Tensor evaluate_closure(Engine::Impl& engine, const std::function<at::Tensor()>& closure) {
  const at::AutoGradMode with_gradients(true);
  const at::Tensor loss = closure();
  require(engine.order.micro_batches.awaits_step(),
          "step(closure): expected that the closure calls engine->backward(loss), found that it ", "has not");
  require(!engine.scaled_backward->counts().used(), "step(closure): expected that the closure calls ",
          "engine->backward(loss), found backward_mean(sum, count), whose counts are known in step() alone, while the ",
          "optimizer asks for the loss and its gradient several times in a step");
  return mean_loss(loss, engine.state.ranks);
}

// Computes a loss inside of the update, whose parameters the optimizer has moved.
at::Tensor loss_inside_update(Engine::Impl& engine, const std::function<at::Tensor()>& closure) {
  ModelConsistency& consistency = engine.order.consistency;
  engine.watch->renew();
  engine.scaled_backward->drop();
  consistency.update_done();  // what backward() finds is one model
  try {
    at::Tensor loss = evaluate_closure(engine, closure);
    engine.order.micro_batches.drop_accumulation();
    engine.shown->take_back();
    finish_gradients(engine.state);
    consistency.slice_updated();
    return loss;
  } catch (...) {
    consistency.slice_updated();
    throw;
  }
}

at::Tensor step_by_closure(Engine::Impl& engine, const std::function<at::Tensor()>& closure) {
  require(closure != nullptr, "step(closure): expected a function, found none");
  require(!engine.parity,
          "step(closure): ds-launch parity records steps between one backward() and step(); expected a ",
          "program that calls engine->step()");
  engine.order.require_driver(Call::kStep);
  require_possible(engine);
  require(engine.order.micro_batches.at_start(),
          "step(closure): expected no engine->backward() before it, because the closure ",
          "calls it; remove the call, or drop its gradients with engine->zero_grad()");
  const at::Tensor loss = evaluate_closure(engine, closure);
  struct Given {
    Update& update;
    ~Given() { update.evaluate_by(nullptr); }
  } const given{*engine.update};
  engine.update->evaluate_by(
      [&, first = true]() mutable { return std::exchange(first, false) ? loss : loss_inside_update(engine, closure); });
  engine.make_step();
  return loss;
}

}  // namespace

at::Tensor Engine::step(const std::function<at::Tensor()>& closure) {
  at::Tensor loss = impl_->named([&] { return step_by_closure(*impl_, closure); });
  impl_->reporter->trace_step(impl_->progress.global_steps);
  return loss;
}

}  // namespace ds::engine
