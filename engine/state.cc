// Reading the engine's state, and moving it: whole parameters, masters, bytes.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/check.h"
#include "dsengine/engine.h"
#include "engine/engine_impl.h"
#include "model/state/finished_gradients.h"
#include "model/state/held_bytes.h"
#include "model/state/parameter_scope.h"
#include "model/state/recomputed_modules.h"
#include "model/state/whole_state.h"
#include "zero/gather/gathered_scope.h"

namespace ds::engine {

void Engine::Impl::synchronize(bool judged_next) {
  order.require(Call::kSynchronizeParameters);
  update->settle(Update::Next::kRead);
  if (step) step->late().read(judged_next);  // not all ranks need come here: it is told, not judged
  watch->look("a call that reads the state");
  state.access->wait_all();
}

void Engine::use_from_this_thread() {
  Impl& self = *impl_;
  self.order.use_from_this_thread();
  const at::Device device = self.state.ranks.device;
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  self.state.access->use_from_this_thread();
  self.state.gradients.reducer->neighbours().use_from_this_thread();
  self.autocast->use_from_this_thread();
  recompute_on_this_thread(self.state, self.config);
}

void Engine::synchronize_parameters() { impl_->synchronize(); }

zero::GatheredParameters Engine::gathered_parameters(const std::vector<at::Tensor>& parameters,
                                                     std::optional<int> modifier_rank) {
  Impl& self = *impl_;
  self.order.require(Call::kGatheredParameters);
  require(!modifier_rank || (*modifier_rank >= 0 && *modifier_rank < self.state.ranks.part->size()),
          "gathered_parameters: modifier_rank: expected a rank from 0 to ", self.state.ranks.part->size() - 1,
          ", found ", modifier_rank.value_or(0));
  const bool modifies = modifier_rank.has_value();
  self.order.scopes.require_gather(modifies);
  self.synchronize();
  if (modifies) self.saves.background().wait_copied();
  zero::GatheredParameters::Scope scope = scope_of_parameters(self.state, parameters, modifier_rank);
  std::vector<size_t> covered;
  for (const auto& [index, bucket] : scope.buckets) covered.push_back(index);
  scope.closed = [&self, modifies, covered = std::move(covered)] {
    if (modifies) {
      at::autocast::clear_cache();  // casted in the scope, perhaps before its end or an exception
      self.watch->renew(covered);   // what else was changed meanwhile is seen by the next look
      self.settings->forget_values();
    }
    self.order.scopes.end_gather(modifies);
  };
  self.order.scopes.begin_gather(modifies);
  return zero::GatheredParameters(std::move(scope));
}

std::vector<std::pair<std::string, at::Tensor>> Engine::module_state_dict() {
  const at::NoGradGuard no_grad;
  impl_->order.require(Call::kModuleStateDict);
  const Phases::Scope phase(impl_->phases, "module_state_dict");
  impl_->synchronize();
  return whole_module(impl_->state);
}

std::vector<std::pair<std::string, at::Tensor>> Engine::fp32_state_dict() {
  const at::NoGradGuard no_grad;
  impl_->order.require(Call::kFp32StateDict);
  const Phases::Scope phase(impl_->phases, "fp32_state_dict");
  impl_->synchronize();
  return whole_masters(impl_->state);
}

Engine::ModelStateBytes Engine::model_state_bytes() const {
  impl_->order.require(Call::kModelStateBytes);
  const HeldBytes held = held_bytes(impl_->state, impl_->progress);
  return {.parameters = held.state.parameters,
          .gradients = held.state.gradients,
          .master = held.state.master,
          .optimizer = held.state.optimizer,
          .average = held.average,
          .gathered = held.gathered,
          .secondary = held.secondary};
}

zero::OffloadedBytes Engine::offloaded_state_bytes() const { return impl_->state.offloaded_bytes(); }

void Engine::offload_states(OffloadStates states) {
  Impl& self = *impl_;
  self.order.require(Call::kOffloadStates);
  const at::NoGradGuard no_grad;
  self.synchronize();
  self.saves.background().wait_copied();
  self.state.access->release_memory();
  if (states.lp_grads) release_gradients(self.state);
  self.moved = std::make_unique<MovedStates>(self.state, MovedParts{.optimizer = states.optim_states,
                                                                    .masters = states.hp_params,
                                                                    .parameters = states.lp_params,
                                                                    .pin_memory = states.pin_memory});
  self.order.states_moved();
}

void Engine::reload_states() {
  impl_->order.require(Call::kReloadStates);
  impl_->moved->restore();
  impl_->moved.reset();
  impl_->order.states_returned();
}

int64_t Engine::moved_bytes() const { return impl_->moved ? impl_->moved->bytes() : 0; }

}  // namespace ds::engine
