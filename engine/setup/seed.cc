#include "engine/setup/seed.h"

#include <ATen/Context.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

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

void set_sdpa_backends(const std::vector<std::string>& backends, c10::Device device) {
  if (device.is_cpu()) return;
  at::Context& context = at::globalContext();
  context.setSDPUseMath(true);  // the use needs a kernel that takes it, whatever an engine before has set
  const at::Tensor any = at::zeros({1, 1, 1, 8}, at::TensorOptions().dtype(at::kHalf).device(device));
  at::_fused_sdp_choice(any, any, any);
  order_sdpa_backends(backends);
  // CUDA has no kernel of that kind: with it LibTorch says "Invalid backend" where none of the list takes the inputs,
  // and without it why each of them does not.
  if (device.is_cuda()) context.setSDPUseOverrideable(false);
}

void order_sdpa_backends(const std::vector<std::string>& backends) {
  static constexpr std::array<std::pair<std::string_view, at::SDPBackend>, 4> kBackends = {
      {{"cudnn", at::SDPBackend::cudnn_attention},
       {"flash", at::SDPBackend::flash_attention},
       {"efficient", at::SDPBackend::efficient_attention},
       {"math", at::SDPBackend::math}}};
  at::Context& context = at::globalContext();
  std::vector<int64_t> order;
  for (const std::string& name : backends) {
    for (const auto& [known, backend] : kBackends) {
      if (known == name) order.push_back(static_cast<int64_t>(backend));
    }
  }
  const auto has = [&](std::string_view name) {
    return std::find(backends.begin(), backends.end(), name) != backends.end();
  };
  for (const auto& [known, backend] : kBackends) {
    if (!has(known)) order.push_back(static_cast<int64_t>(backend));
  }
  context.setSDPPriorityOrder(order);
  context.setSDPUseCuDNN(has("cudnn"));
  context.setSDPUseFlash(has("flash"));
  context.setSDPUseMemEfficient(has("efficient"));
  context.setSDPUseMath(has("math"));
}

}  // namespace ds::engine
