#include "engine/state/shared_buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <map>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/text.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

// Each once, in the order of the module.
std::vector<at::Tensor> buffers_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined() && buffer.numel() > 0 && seen.insert(buffer.unsafeGetTensorImpl()).second) {
      result.push_back(buffer);
    }
  }
  return result;
}

}  // namespace

void broadcast_buffers(const torch::nn::Module& module, comm::Communicator& ranks) {
  if (ranks.size() == 1) return;
  const at::NoGradGuard no_grad;
  // The host's first, on all ranks.
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;
  std::map<Kind, std::vector<at::Tensor>> by_kind;
  for (const at::Tensor& buffer : buffers_of(module)) {
    const at::Device device = buffer.device();
    by_kind[{device.type(), device.index(), buffer.scalar_type()}].push_back(buffer.variable_data());
  }
  for (const auto& [kind, buffers] : by_kind) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& buffer : buffers) flat.push_back(buffer.reshape({-1}));
    const at::Tensor all = at::cat(flat);
    ranks.broadcast(all, /*root=*/0, cat("buffers of ", c10::toString(std::get<2>(kind)))).wait();
    if (ranks.rank() == 0) continue;
    int64_t begin = 0;
    for (const at::Tensor& buffer : buffers) {
      buffer.copy_(all.narrow(0, begin, buffer.numel()).view(buffer.sizes()));
      begin += buffer.numel();
    }
  }
}

uint64_t digest_of_buffers(const torch::nn::Module& module) {
  uint64_t digest = 0;
  for (const at::Tensor& buffer : buffers_of(module)) digest = digest * 0x9E3779B97F4A7C15 + zero::digest_of(buffer);
  return digest;
}

}  // namespace ds::engine
