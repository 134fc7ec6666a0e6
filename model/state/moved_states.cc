#include "model/state/moved_states.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>

#include "comm/agreement.h"
#include "core/check.h"
#include "model/agreement/host_room.h"

namespace ds::engine {
namespace {

constexpr const char* kMovedPurpose = "states that are offloaded until reload_states()";

// Gives freed memory back to the device: LibTorch keeps it for this process otherwise.
void release_freed_memory(at::Device device) {
  if (device.is_cpu()) return;
  const c10::DeviceGuard guard(device);
  c10::getDeviceAllocator(device.type())->emptyCache();
}

std::vector<at::Tensor> tensors_of(const ModelState& state, const MovedParts& parts) {
  std::vector<at::Tensor> tensors;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    const zero::ParameterBucket& bucket = state.buckets[b];
    if (parts.parameters && bucket.kept_slice().stored_bytes() == 0) tensors.push_back(bucket.kept());
    if (state.updates_on_host(b)) continue;
    // A master that is a part of the parameters goes with them.
    if (parts.masters && !state.masters[b].is_alias_of(bucket.kept())) tensors.push_back(state.masters[b]);
    if (parts.masters && state.average) tensors.push_back(state.average->values(b));
    if (!parts.optimizer) continue;
    for (const auto& [name, values] : state.optimizer.states(b)) tensors.push_back(values);
  }
  if (!parts.parameters) return tensors;
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) {
    if (bucket.kept_slice().stored_bytes() == 0) tensors.push_back(bucket.kept());
  }
  for (const zero::Parameter& parameter : state.frozen_outside_buckets()) tensors.push_back(parameter.tensor.detach());
  tensors.erase(std::remove_if(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return !t.defined(); }),
                tensors.end());
  return tensors;
}

}  // namespace

MovedStates::MovedStates(const ModelState& state, const MovedParts& parts) {
  const at::RecordFunctionGuard not_gathered(/*is_enabled=*/false);  // for what is done with parameters here
  const at::Device device = state.ranks.device;
  comm::Communicator& world = *state.ranks.world;
  const std::vector<at::Tensor> tensors = tensors_of(state, parts);
  require_room_on_hosts(offload::MovedStorage::arena_bytes(tensors), kMovedPurpose, device, world);
  std::exception_ptr failure;
  try {
    memory_.emplace(tensors, kMovedPurpose, offload::ArenaOptions{.pin = parts.pin_memory, .device = device});
  } catch (...) {
    failure = std::current_exception();
  }
  if (const int failed = comm::failed_rank(failure, device, world); failed >= 0) {
    memory_->restore();
    throw ConfigError(cat("offload_states(): rank ", failed,
                          " could not take host memory; its message says why. Nothing was moved (this is rank ",
                          world.rank(), ")"));
  }
  if (parts.parameters) {
    for (const zero::Parameter& parameter : state.parameters) hide(parameter);
    for (const zero::Parameter& parameter : state.frozen) hide(parameter);
  }
  release_freed_memory(device);
}

// Without memory a read would be a fault; without elements it is an error of shapes.
void MovedStates::hide(const zero::Parameter& parameter) {
  hidden_.emplace_back(parameter.tensor, parameter.tensor.detach());
  at::Tensor(parameter.tensor).set_data(at::empty({0}, parameter.tensor.options().requires_grad(false)));
}

void MovedStates::restore() {
  const at::RecordFunctionGuard not_gathered(/*is_enabled=*/false);
  memory_->restore();
  for (auto& [parameter, values] : hidden_) parameter.set_data(values);
}

}  // namespace ds::engine
