// Brings weights that the host has updated to the device, while the host updates the next ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "core/device/transfer_stream.h"

namespace ds::offload {

// Not thread safe.
class WriteBack {
 public:
  // `buffers`: at least one, flat host memory in the dtype of the weights, each as long as the longest slice.
  WriteBack(at::Device device, std::vector<at::Tensor> buffers);

  // `fill(buffer)` writes new weights into a host buffer of the length of `to`; then they are on their way to `to`, and
  // what the current stream is given next sees them.
  void send(const at::Tensor& to, const std::function<void(const at::Tensor& buffer)>& fill);

 private:
  struct Buffer {
    at::Tensor memory;
    TransferStream::Mark sent;
  };

  std::vector<Buffer> buffers_;
  size_t next_ = 0;
  TransferStream stream_;  // last: its destructor waits for copies out of the buffers
};

}  // namespace ds::offload
