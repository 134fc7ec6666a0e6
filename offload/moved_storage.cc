#include "offload/moved_storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <set>

#include "core/memory/storage_memory.h"

namespace ds::offload {
namespace {

// All bytes of a tensor's storage.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const auto length = static_cast<int64_t>(tensor.storage().nbytes());
  return at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false))
      .set_(tensor.storage(), /*storage_offset=*/0, {length}, {1});
}

}  // namespace

// Each storage that has memory, once.
std::vector<MovedStorage::Part> MovedStorage::parts_of(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> seen;
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    const at::Storage& storage = tensor.storage();
    if (storage.nbytes() > 0 && seen.insert(storage.unsafeGetStorageImpl()).second) parts.push_back({tensor, {}});
  }
  return parts;
}

int64_t MovedStorage::arena_bytes(const std::vector<at::Tensor>& tensors) {
  size_t total = 0;
  for (const Part& part : parts_of(tensors)) {
    total += PinnedArena::bytes_of(static_cast<int64_t>(part.tensor.storage().nbytes()), at::kByte);
  }
  return static_cast<int64_t>(total);
}

MovedStorage::MovedStorage(const std::vector<at::Tensor>& tensors, const std::string& purpose,
                           const ArenaOptions& options)
    : parts_(parts_of(tensors)) {
  const at::NoGradGuard no_grad;
  PinnedArena arena(purpose, static_cast<size_t>(arena_bytes(tensors)), options);
  for (Part& part : parts_) {
    const at::Tensor bytes = bytes_of(part.tensor);
    part.copy = arena.take(bytes.numel(), at::kByte).copy_(bytes);
    bytes_ += bytes.numel();
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
