#include "engine/update/update_paths.h"

namespace ds::engine {

std::unique_ptr<Update> make_update(const UpdateParts& parts) {
  const ModelState& state = parts.state;
  if (state.optimizer.steps_on_parameters()) return make_client_update(parts);
  // No bucket may be left for the host, where the share of those that are offloaded is small.
  if (!state.offloaded || !state.offloaded->gradients()) return make_device_update(parts);
  if (state.offloaded->speculation()) return make_speculative_update(parts);
  return state.plan.offload.delayed ? make_delayed_update(parts) : make_host_update(parts);
}

}  // namespace ds::engine
