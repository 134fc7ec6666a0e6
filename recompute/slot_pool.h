// Preallocated places for kept inputs (contiguous_memory_optimization), and the streams that copy inputs to the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "core/device/transfer_stream.h"

namespace ds::recompute {

// Copies of kept inputs between a device and pinned memory of the host, on a stream of their own. Thread safe: a region
// ends on a thread of autograd. "The current stream" is that of the calling thread.
class HostCopies {
 public:
  explicit HostCopies(at::Device device) : device_(device), stream_(device) {}

  // Copies `from`, flat, to pinned memory, after what the current stream was given; it goes on beside.
  TransferStream::Mark keep(const at::Tensor& pinned, const at::Tensor& from);
  // Makes a new tensor on the device, for work that the current stream is given from now on. The copy waits for earlier
  // copies only: where the host is ahead it is made beside what the device still computes. `pinned` may be freed at
  // once if it is LibTorch's.
  at::Tensor bring(const at::Tensor& pinned);
  // Makes work that the current stream is given from now on wait for the copy.
  void wait_for(const TransferStream::Mark& kept) { stream_.wait_on_device(kept); }

 private:
  at::Device device_;
  std::mutex mutex_;
  TransferStream stream_;
};

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
