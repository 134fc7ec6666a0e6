// offload_states() and reload_states(): the device's memory for something else between two steps.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>

#include "core/check.h"
#include "engine/agreement/host_room.h"
#include "engine/agreement/shared_failure.h"
#include "engine/engine_impl.h"

namespace ds::engine {
namespace {

constexpr const char* kMovedPurpose = "states that are offloaded until reload_states()";

// What was freed goes back to the device: LibTorch keeps it for this process otherwise.
void release_freed_memory(at::Device device) {
  if (device.is_cpu()) return;
  const c10::DeviceGuard guard(device);
  c10::getDeviceAllocator(device.type())->emptyCache();
}

}  // namespace

void Engine::Impl::require_states_here(const char* call) const {
  require(!moved_states, call, " was called while states are offloaded; call reload_states() first");
}

std::vector<at::Tensor> Engine::Impl::tensors_of(const OffloadStates& states) const {
  std::vector<at::Tensor> tensors;
  for (size_t b = 0; b < buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = buckets[b];
    if (states.lp_params && bucket.stored_bytes() == 0) tensors.push_back(bucket.kept());
    if (offloaded && offloaded->updates(b)) continue;
    // A master that is a part of the parameters goes with them.
    if (states.hp_params && !masters[b].is_alias_of(bucket.kept())) tensors.push_back(masters[b]);
    if (!states.optim_states || !optimizer) continue;
    for (const auto& [name, state] : optimizer->states(static_cast<int64_t>(b))) tensors.push_back(state);
  }
  if (!states.lp_params) return tensors;
  for (const zero::ParameterBucket& bucket : frozen_buckets) {
    if (bucket.stored_bytes() == 0) tensors.push_back(bucket.kept());
  }
  if (!gatherer) {
    for (const zero::Parameter& parameter : frozen) tensors.push_back(parameter.tensor.detach());
  }
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return !t.defined(); }),
                tensors.end());
  return tensors;
}

void Engine::offload_states(OffloadStates states) {
  Impl& self = *impl_;
  self.require_states_here("offload_states()");
  require(self.backwards_since_step == 0 && self.micro_steps_since_update == 0,
          "offload_states() was called inside an accumulation, after ", self.micro_steps_since_update, " of ",
          self.config.gradient_accumulation_steps, " micro-batches; call it after step() at the boundary");
  require(self.gathered_scopes == 0, "offload_states() was called while ", self.gathered_scopes,
          " scopes of gathered_parameters() are open; end them first");
  const at::NoGradGuard no_grad;
  synchronize_parameters();
  self.saving.wait_copied();
  if (self.gatherer) self.gatherer->release_memory();
  if (states.lp_grads) self.reducer->release_buffers();
  const at::RecordFunctionGuard not_gathered(/*is_enabled=*/false);  // for what is done with parameters here
  const std::vector<at::Tensor> tensors = self.tensors_of(states);
  require_room_on_hosts(offload::MovedStorage::arena_bytes(tensors), kMovedPurpose, self.device, *self.world);
  auto moved = std::make_unique<Impl::MovedStates>();
  std::exception_ptr failure;
  try {
    moved->memory.emplace(tensors, kMovedPurpose,
                          offload::ArenaOptions{.pin = states.pin_memory, .device = self.device});
  } catch (...) {
    failure = std::current_exception();
  }
  if (const int failed = failed_rank(failure, self.device, *self.world); failed >= 0) {
    moved->memory->restore();
    throw ConfigError(cat("offload_states(): rank ", failed,
                          " could not take host memory; its message says why. Nothing was moved (this is rank ",
                          self.world->rank(), ")"));
  }
  if (states.lp_params) {
    // Without memory a read would be a fault; without elements it is an error of shapes.
    const auto hide = [&](const zero::Parameter& parameter) {
      moved->hidden.emplace_back(parameter.tensor, parameter.tensor.detach());
      at::Tensor(parameter.tensor).set_data(at::empty({0}, parameter.tensor.options().requires_grad(false)));
    };
    std::for_each(self.parameters.begin(), self.parameters.end(), hide);
    std::for_each(self.frozen.begin(), self.frozen.end(), hide);
  }
  self.moved_states = std::move(moved);
  release_freed_memory(self.device);
}

void Engine::reload_states() {
  Impl& self = *impl_;
  require(self.moved_states != nullptr, "reload_states() was called, but no states are offloaded; call ",
          "offload_states() first");
  const at::RecordFunctionGuard not_gathered(/*is_enabled=*/false);
  self.moved_states->memory->restore();
  for (auto& [parameter, values] : self.moved_states->hidden) parameter.set_data(values);
  self.moved_states.reset();
}

int64_t Engine::moved_bytes() const { return impl_->moved_states ? impl_->moved_states->memory->bytes() : 0; }

}  // namespace ds::engine
