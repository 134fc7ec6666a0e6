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

void set_float32_matmul_precision(const std::string& precision) {
  at::Context& context = at::globalContext();
  context.setFloat32MatmulPrecision(precision);
  context.setAllowTF32CuDNN(precision != "highest");
}

}  // namespace ds::engine
