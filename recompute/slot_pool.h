// Preallocated places for kept inputs (contiguous_memory_optimization), and the streams that copy inputs to the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "recompute/host_copies.h"

namespace ds::recompute {

// Thread safe: regions end on the threads of autograd.
class SlotPool {
 public:
  // A place taken until its last copy is destroyed.
  struct Slot {
    at::Tensor memory;  // [numel]
    std::shared_ptr<void> lease;
  };
  // From a buffer of `slots` places, one buffer for each (position, numel, options), made at first use. Throws
  // UsageError when all are taken.
  Slot take(size_t position, int64_t numel, const at::TensorOptions& options, int64_t slots);
  // One for each device, made at first use.
  std::shared_ptr<HostCopies> copies_on(at::Device device);

 private:
  struct Buffer;
  using Key = std::tuple<size_t, int64_t, at::ScalarType, at::DeviceType, at::DeviceIndex, int64_t>;
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Buffer>> buffers_;
  std::map<at::DeviceIndex, std::shared_ptr<HostCopies>> copies_;  // last: they wait for copies from the buffers
};

}  // namespace ds::recompute
