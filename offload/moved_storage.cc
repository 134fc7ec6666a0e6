#include "offload/moved_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <set>

#include "core/storage_memory.h"

namespace ds::offload {
namespace {

// All bytes of a tensor's storage.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto length = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
      .set_(tensor.storage(), /*storage_offset=*/0, {length}, {1});
}

}  // namespace

MovedStorage::MovedStorage(const std::vector<at::Tensor>& tensors, const std::string& purpose,
                           const ArenaOptions& options) {
  const at::NoGradGuard no_grad;
  std::set<const void*> seen;
  size_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    const size_t length = tensor.storage().nbytes();
    if (length == 0 || !seen.insert(tensor.storage().unsafeGetStorageImpl()).second) continue;
    parts_.push_back({tensor, {}});
    total += PinnedArena::bytes_of(static_cast<int64_t>(length), at::kByte);
    bytes_ += static_cast<int64_t>(length);
  }
  PinnedArena arena(purpose, total, options);
  for (Part& part : parts_) {
    const at::Tensor bytes = bytes_of(part.tensor);
    part.copy = arena.take(bytes.numel(), at::kByte).copy_(bytes);
  }
  for (const Part& part : parts_) take_storage(part.tensor);
}

void MovedStorage::restore() {
  const at::NoGradGuard no_grad;
  for (; !parts_.empty(); parts_.pop_back()) {
    const Part& part = parts_.back();
    const c10::DeviceGuard guard(part.tensor.device());
    const size_t length = part.copy.nbytes();
    give_storage(part.tensor, c10::GetAllocator(part.tensor.device().type())->allocate(length), length);
    bytes_of(part.tensor).copy_(part.copy);
    bytes_ -= static_cast<int64_t>(length);
  }
}

}  // namespace ds::offload
