// Memory of tensors, moved to the host for a while: the tensors and all views of them stay, without elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "offload/pinned_arena.h"

namespace ds::offload {

// What tensors share is moved once. Not thread safe; nothing may read the tensors between the two ends.
class MovedStorage {
 public:
  // Bytes of the arena for these.
  static int64_t arena_bytes(const std::vector<at::Tensor>& tensors);

  // Copies the whole storages of `tensors` (those that have memory) to an arena and frees them. Throws ConfigError when
  // the host has no room; then nothing was moved.
  MovedStorage(const std::vector<at::Tensor>& tensors, const std::string& purpose, const ArenaOptions& options);
  // Takes memory of the device again and copies everything back. Throws what the allocator throws when there is none;
  // then what was not copied is still on the host, and the call may be repeated.
  void restore();
  int64_t bytes() const { return bytes_; }

 private:
  struct Part {
    at::Tensor tensor;  // one that has the storage
    at::Tensor copy;    // [bytes], in the arena
  };

  static std::vector<Part> parts_of(const std::vector<at::Tensor>& tensors);

  std::vector<Part> parts_;
  int64_t bytes_ = 0;
};

}  // namespace ds::offload
