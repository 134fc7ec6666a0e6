// Messages of a rank to itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <memory>

#include "comm/operation_name.h"
#include "dsengine/comm.h"

namespace ds::comm {

// Matches sends and receives by tag, in order. Any device. One thread at a time, which includes wait().
class SelfMessages {
 public:
  // Sends a message, which is complete at once: the tensor is copied.
  Work send(const at::Tensor& tensor, int tag);
  // Receives a message; complete once the matching send was issued. Its wait() throws UsageError when there was none,
  // as none can come any more. Both throw UsageError when the matching tensors differ in elements or data type.
  Work recv(const at::Tensor& tensor, int tag, OperationName name);

 private:
  class Receive;
  struct Box {
    std::deque<at::Tensor> sent;
    std::deque<std::shared_ptr<Receive>> expected;
  };
  std::map<int, Box> boxes_;
};

}  // namespace ds::comm
