#include "model/state/shared_buffers.h"

#include <unordered_set>
#include <vector>

#include "comm/agreement.h"
#include "zero/value_digest.h"

namespace ds::engine {
namespace {

// Returns each buffer once, in the order of the module.
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
  comm::broadcast_values(buffers_of(module), /*root=*/0, ranks, "buffers");
}

uint64_t digest_of_buffers(const torch::nn::Module& module) {
  uint64_t digest = 0;
  for (const at::Tensor& buffer : buffers_of(module)) digest = digest * 0x9E3779B97F4A7C15 + zero::digest_of(buffer);
  return digest;
}

}  // namespace ds::engine
