// Copies around an update on the host: new weights, which go to the device, and old values, to go back to.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "core/device/transfer_stream.h"

namespace ds::offload {

// Brings weights that the host has updated to the device, while the host updates the next ones. Not thread safe.
class WriteBack {
 public:
  // `buffers`: at least one, flat host memory in the dtype of the weights, each as long as the longest slice.
  WriteBack(at::Device device, std::vector<at::Tensor> buffers);

  // Sends new weights: `fill(buffer)` writes them into a host buffer of the length of `to`; then they are on their way
  // to `to`, and the work that the current stream is given next sees them.
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

// Exact copies of tensors to go back to, for a change that may have to be undone. Not thread safe.
class UndoCopy {
 public:
  UndoCopy() = default;
  // `memory`: one tensor for each that is to be kept, of its size and dtype.
  explicit UndoCopy(std::vector<at::Tensor> memory) : memory_(std::move(memory)) {}

  bool holds() const { return !kept_.empty(); }
  // Copies `tensors`, which are kept alive until restore() or forget().
  void keep(std::vector<at::Tensor> tensors);
  // Gives the tensors the contents again that they had in keep(). Does nothing where none are held.
  void restore();
  void forget() { kept_.clear(); }

 private:
  std::vector<at::Tensor> memory_;
  std::vector<at::Tensor> kept_;
};

}  // namespace ds::offload
