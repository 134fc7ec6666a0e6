// Copies of kept inputs between a device and pinned memory of the host, on a stream of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

#include "core/device/transfer_stream.h"

namespace ds::recompute {

// Thread safe: a region ends on a thread of autograd. "The current stream" is that of the calling thread.
class HostCopies {
 public:
  explicit HostCopies(at::Device device) : device_(device), stream_(device) {}

  // Copies `from`, flat, to pinned memory, after what the current stream was given; it goes on beside.
  TransferStream::Mark keep(const at::Tensor& pinned, const at::Tensor& from);
  // A new tensor on the device, for what the current stream is given from now on. The copy waits for earlier copies
  // only: where the host is ahead it is made beside what the device still computes. `pinned` may be freed at once if it
  // is LibTorch's.
  at::Tensor bring(const at::Tensor& pinned);
  // What the current stream is given from now on comes after the copy.
  void wait_for(const TransferStream::Mark& kept) { stream_.wait_on_device(kept); }

 private:
  at::Device device_;
  std::mutex mutex_;
  TransferStream stream_;
};

}  // namespace ds::recompute
