// Messages of a rank to itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <memory>
#include <string>

#include "dsengine/comm.h"

namespace ds::comm {

// Matches sends and receives by tag, in order. Any device. One thread at a time, which includes wait().
class SelfMessages {
 public:
  // Complete at once: the tensor is copied.
  Work send(const at::Tensor& tensor, int tag, const std::string& what);
  // Complete once the matching send was issued. Its wait() throws UsageError when there was none, as none can come any
  // more. Both throw UsageError when the matching tensors differ in elements or data type.
  Work recv(const at::Tensor& tensor, int tag, const std::string& what);

 private:
  class Receive;
  struct Box {
    std::deque<at::Tensor> sent;
    std::deque<std::shared_ptr<Receive>> expected;
  };
  std::map<int, Box> boxes_;
};

}  // namespace ds::comm
