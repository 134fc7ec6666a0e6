// Memory that direct IO can use.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>

#include "core/round_up.h"
#include "offload/aio_file.h"

namespace ds::offload {

// Bytes at an aligned address, rounded up to whole blocks.
inline at::Tensor aligned_bytes(int64_t bytes) {
  const int64_t size = round_up(bytes, AioFile::alignment());
  void* const memory = std::aligned_alloc(AioFile::alignment(), size);
  return torch::from_blob(
      memory, {size}, [](void* block) { std::free(block); }, at::kByte);
}

inline at::Tensor random_bytes(int64_t bytes) {
  at::Tensor memory = aligned_bytes(bytes);
  memory.random_(0, 256);
  return memory;
}

}  // namespace ds::offload
