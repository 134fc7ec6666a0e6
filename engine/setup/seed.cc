#include "engine/setup/seed.h"

#include <ATen/Context.h>

namespace ds::engine {

void seed_everything(uint64_t seed, int rank) { at::manual_seed(seed + static_cast<uint64_t>(rank)); }

void set_deterministic(bool deterministic, bool warn_only) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(deterministic, warn_only);
  context.setDeterministicCuDNN(deterministic);
  if (deterministic) context.setBenchmarkCuDNN(false);
}

}  // namespace ds::engine
