#include "model/state/held_bytes.h"

namespace ds::engine {

int64_t frozen_bytes(const ModelState& state) {
  int64_t bytes = 0;
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) bytes += bucket.held_bytes();
  for (const zero::Parameter& parameter : state.frozen_outside_buckets()) {
    bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  return bytes;
}

int64_t device_state_bytes(const ModelState& state) {
  if (state.plan.error_feedback) return state.optimizer.own->state_bytes();  // nothing of it is elsewhere
  int64_t bytes = 0;
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (state.updates_on_host(b)) continue;
    for (const auto& [name, values] : state.optimizer.states(b)) bytes += static_cast<int64_t>(values.nbytes());
  }
  return bytes;
}

HeldBytes held_bytes(const ModelState& state, const Progress& progress) {
  HeldBytes bytes;
  for (const zero::ParameterBucket& bucket : state.buckets) bytes.state.parameters += bucket.held_bytes();
  bytes.state.parameters += frozen_bytes(state);
  for (size_t b = 0; b < state.buckets.size(); ++b) {
    if (state.updates_on_host(b)) continue;
    const at::Tensor& master = state.masters[b];
    if (!master.is_alias_of(state.buckets[b].kept())) bytes.state.master += static_cast<int64_t>(master.nbytes());
  }
  bytes.state.optimizer = device_state_bytes(state);
  if (state.average) bytes.average = state.average->bytes(/*in_host_memory=*/false);
  bytes.state.gradients = progress.gradient_bytes;
  bytes.gathered = progress.gathered_bytes;
  for (const zero::ParameterBucket& bucket : state.buckets) bytes.secondary += bucket.secondary_bytes();
  for (const zero::ParameterBucket& bucket : state.frozen_buckets) bytes.secondary += bucket.secondary_bytes();
  return bytes;
}

}  // namespace ds::engine
