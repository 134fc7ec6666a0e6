// Host memory for what is offloaded: one region of exact size for one purpose, cut into tensors. Slices of parameters
// are kept in such a region, and storages of tensors are moved to one for a while.
//
// LibTorch's allocator of pinned memory rounds every block to a power of two, and its plain one comes from malloc. A
// region is mapped for itself, to the page. Its pages are touched when it is made, by the thread that makes it and, for
// large ones, by others for that time: they exist before training begins, and lie on the memory nodes of the processors
// that the making thread may use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/slices/slice_store.h"

namespace ds::offload {

struct ArenaOptions {
  bool pin = true;               // register with CUDA where `device` is a CUDA device; means nothing on the CPU
  bool huge_pages = true;        // ask for transparent huge pages
  at::Device device = at::kCPU;  // the device that the memory is copied from and to
};

// A region that is cut into tensors. Not thread safe; its tensors are as any others.
class PinnedArena {
 public:
  static constexpr size_t kAlignment = 4096;  // bytes, of every tensor's address: direct IO and vector stores need it

  // Bytes that take(numel, dtype) uses.
  static size_t bytes_of(int64_t numel, at::ScalarType dtype);

  // Logs what it takes, then takes it. Throws ConfigError when this process cannot have so much (see host_budget.h).
  // `purpose` goes into logs and errors: "optimizer states". Memory that cannot be pinned stays pageable, with a
  // warning that says why.
  PinnedArena(std::string purpose, size_t bytes, ArenaOptions options);

  // Zeros, flat, in a storage of its own, so that its memory can be exchanged (core/memory/storage_memory.h). The
  // region lives as long as the arena or any of its tensors; a part is never handed out twice.
  at::Tensor take(int64_t numel, at::ScalarType dtype);

  size_t size() const;  // whole pages
  size_t used() const { return used_; }
  bool pinned() const;
  bool huge_pages() const;  // whether they were asked for and the kernel offers them
  const std::string& purpose() const { return purpose_; }

 private:
  class Region;
  std::string purpose_;
  std::shared_ptr<Region> region_;
  size_t used_ = 0;
};

// Keeps slices of parameters in the host memory of an arena (offload_param: cpu).
class ArenaSlices final : public SliceStore {
 public:
  explicit ArenaSlices(std::shared_ptr<PinnedArena> arena) : arena_(std::move(arena)) {}
  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override { return arena_->take(numel, dtype); }

 private:
  std::shared_ptr<PinnedArena> arena_;
};

// Memory of tensors, moved to the host for a while: the tensors and all views of them stay, without elements. A storage
// that several tensors share is moved once. Not thread safe; nothing may read the tensors before restore() has
// returned.
class MovedStorage {
 public:
  // Bytes of an arena that holds the storages of `tensors`.
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
