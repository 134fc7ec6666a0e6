// One parameter of a partitioned model: its gradient, its master and its optimizer states, whole or this rank's part.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <functional>

#include "core/check.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/state/finished_gradients.h"
#include "model/state/parameter_scope.h"
#include "model/state/parameter_values.h"
#include "model/state/row_wise.h"

namespace ds::engine {
namespace {

// Has `change` change the master of a parameter; the weights of all ranks follow. `call`: the call to name. Collective.
void change_master(Engine::Impl& engine, const at::Tensor& parameter, const char* call,
                   const std::function<void(const ParameterValues& of, const at::Tensor& master)>& change) {
  ModelState& state = engine.state;
  engine.order.scopes.require_own_weights(call);
  engine.synchronize();
  const ParameterValues values(state, parameter, call);
  require_on_one_stage(state, {parameter}, cat(call, ": expected no call").c_str());
  engine.saves.background().wait_copied();
  values.use_master(/*changes=*/true, [&](const at::Tensor& master) {
    change(values, master);
    const auto kept = state.overwritten.find(values.bucket());
    if (kept == state.overwritten.end()) return;
    values.write_local(kept->second.master, values.local(master));
    values.write_local(kept->second.shown, values.local(state.optimizer.weights(values.bucket(), master)));
  });
  state.access->updated(values.bucket());
  state.access->end_update();
  state.access->wait_all();
  at::autocast::clear_cache();  // casted copies of the weights before
  engine.watch->renew({values.bucket()});
}

}  // namespace

at::Tensor Engine::Impl::reduced_gradient(const ParameterValues& values, const char* call) {
  order.require(Call::kFullGradient);
  const zero::GradientReducer& reducer = *state.gradients.reducer;
  require(!state.plan.pipeline && !reducer.keeps_local(), call, ": parameter ", values.name(), ": there is no mean ",
          "gradient between backward() and step() of ", state.plan.pipeline ? "a pipeline" : "this optimizer");
  require(order.micro_batches.at_boundary() && order.scopes.synchronizes(), call, ": parameter ", values.name(),
          ": expected the backward() of the last micro-batch of a step, found micro-batch ",
          order.micro_batches.done() + 1, " of ", order.micro_batches.per_update());
  return finished_gradient(values, call);
}

at::Tensor Engine::Impl::finished_gradient(const ParameterValues& values, const char* call) {
  require(!state.gradients.reducer->keeps_local(), call, ": parameter ", values.name(), ": there is no mean ",
          "gradient between backward() and step() of this optimizer");
  update->settle(Update::Next::kRead);
  finish_gradients(state);
  return flat_gradient(state, values.bucket());
}

double Engine::clip_grad_norm_(double max_norm) {
  Impl& self = *impl_;
  self.named([&] { self.order.require(Call::kClipGradNorm); });
  require(max_norm > 0, "clip_grad_norm_(): max_norm: expected a positive number, found ", max_norm);
  require(self.order.micro_batches.at_boundary() && self.order.scopes.synchronizes(),
          "clip_grad_norm_(): expected the backward() of the ", "last micro-batch of a step, found micro-batch ",
          self.order.micro_batches.done() + 1, " of ", self.order.micro_batches.per_update());
  const Phases::Scope phase(self.phases, "clip_grad_norm_");
  return self.step->clip(max_norm);
}

at::Tensor Engine::safe_get_full_grad(const at::Tensor& parameter) {
  const Phases::Scope phase(impl_->phases, "safe_get_full_grad");
  const ParameterValues values(impl_->state, parameter, "safe_get_full_grad()");
  return values.whole(impl_->reduced_gradient(values, "safe_get_full_grad()")) /
         impl_->scaled_backward->gradient_scale();
}

void Engine::safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value) {
  const Phases::Scope phase(impl_->phases, "safe_set_full_grad");
  const ParameterValues values(impl_->state, parameter, "safe_set_full_grad()");
  const at::Tensor flat = impl_->reduced_gradient(values, "safe_set_full_grad()");
  values.write_whole(flat, value * impl_->scaled_backward->gradient_scale());
  keep_flat_gradient(impl_->state, values.bucket(), flat);
  impl_->settings->note_value(
      {.call = "safe_set_full_grad()", .parameter = values.name(), .value = value, .is_gradient = true});
}

at::Tensor Engine::safe_get_local_grad(const at::Tensor& parameter) {
  const ParameterValues values(impl_->state, parameter, "safe_get_local_grad()");
  return values.local(impl_->reduced_gradient(values, "safe_get_local_grad()")) /
         impl_->scaled_backward->gradient_scale();
}

void Engine::safe_set_local_grad(const at::Tensor& parameter, const at::Tensor& value) {
  const ParameterValues values(impl_->state, parameter, "safe_set_local_grad()");
  const at::Tensor flat = impl_->reduced_gradient(values, "safe_set_local_grad()");
  values.write_local(flat, value * impl_->scaled_backward->gradient_scale());
  keep_flat_gradient(impl_->state, values.bucket(), flat);
  impl_->settings->note_value({.call = "safe_set_local_grad()",
                               .parameter = values.name(),
                               .value = value,
                               .is_local = true,
                               .is_gradient = true});
}

at::Tensor Engine::safe_get_full_fp32_param(const at::Tensor& parameter) {
  const Phases::Scope phase(impl_->phases, "safe_get_full_fp32_param");
  impl_->order.scopes.require_own_weights("safe_get_full_fp32_param()");
  impl_->synchronize();
  const ParameterValues values(impl_->state, parameter, "safe_get_full_fp32_param()");
  at::Tensor result;
  values.use_master(/*changes=*/false, [&](const at::Tensor& master) { result = values.whole(master); });
  return result;
}

at::Tensor Engine::safe_get_local_fp32_param(const at::Tensor& parameter) {
  impl_->order.scopes.require_own_weights("safe_get_local_fp32_param()");
  impl_->synchronize();
  const ParameterValues values(impl_->state, parameter, "safe_get_local_fp32_param()");
  at::Tensor result;
  values.use_master(/*changes=*/false, [&](const at::Tensor& master) { result = values.local(master); });
  return result;
}

void Engine::safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value) {
  const Phases::Scope phase(impl_->phases, "safe_set_full_fp32_param");
  change_master(
      *impl_, parameter, "safe_set_full_fp32_param()", [&](const ParameterValues& of, const at::Tensor& master) {
        of.write_whole(master, value);
        impl_->settings->note_value({.call = "safe_set_full_fp32_param()", .parameter = of.name(), .value = value});
      });
}

void Engine::safe_set_local_fp32_param(const at::Tensor& parameter, const at::Tensor& value) {
  change_master(
      *impl_, parameter, "safe_set_local_fp32_param()", [&](const ParameterValues& of, const at::Tensor& master) {
        of.write_local(master, value);
        impl_->settings->note_value(
            {.call = "safe_set_local_fp32_param()", .parameter = of.name(), .value = value, .is_local = true});
      });
}

at::Tensor Engine::safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state) {
  const Phases::Scope phase(impl_->phases, "safe_get_full_optimizer_state");
  impl_->synchronize();
  const ParameterValues values(impl_->state, parameter, "safe_get_full_optimizer_state()");
  at::Tensor result;
  values.use_state(state, /*changes=*/false, [&](const at::Tensor& flat) { result = values.whole(flat); });
  return result;
}

at::Tensor Engine::safe_get_local_optimizer_state(const at::Tensor& parameter, const std::string& state) {
  impl_->synchronize();
  const ParameterValues values(impl_->state, parameter, "safe_get_local_optimizer_state()");
  at::Tensor result;
  values.use_state(state, /*changes=*/false, [&](const at::Tensor& flat) { result = values.local(flat); });
  return result;
}

void Engine::safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value,
                                           const std::string& state) {
  impl_->synchronize();
  impl_->saves.background().wait_copied();
  const ParameterValues values(impl_->state, parameter, "safe_set_full_optimizer_state()");
  require_on_one_stage(impl_->state, {parameter}, "safe_set_full_optimizer_state(): expected no call");
  values.use_state(state, /*changes=*/true, [&](const at::Tensor& flat) { values.write_whole(flat, value); });
  impl_->settings->note_value(
      {.call = "safe_set_full_optimizer_state()", .parameter = values.name(), .value = value, .state = state});
}

void Engine::safe_set_local_optimizer_state(const at::Tensor& parameter, const at::Tensor& value,
                                            const std::string& state) {
  impl_->synchronize();
  impl_->saves.background().wait_copied();
  const ParameterValues values(impl_->state, parameter, "safe_set_local_optimizer_state()");
  require_on_one_stage(impl_->state, {parameter}, "safe_set_local_optimizer_state(): expected no call");
  values.use_state(state, /*changes=*/true, [&](const at::Tensor& flat) { values.write_local(flat, value); });
  impl_->settings->note_value({.call = "safe_set_local_optimizer_state()",
                               .parameter = values.name(),
                               .value = value,
                               .state = state,
                               .is_local = true});
}

}  // namespace ds::engine
