// The shapes of the tensors of a message between stages: as values, as the numbers that travel ahead of a message, and
// the buffers that tensors of these shapes are received in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dsengine/layer_spec.h"

namespace ds::pipeline {

// The receiver's knowledge of one tensor before that arrives.
struct MessageShape {
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = false;
  std::vector<int64_t> sizes;
  bool operator==(const MessageShape&) const = default;
};
using MessageShapes = std::vector<MessageShape>;

MessageShapes shapes_of(const Tensors& tensors);

// The shapes as text for messages: "Float [2, 3], Long [2]".
std::string text_of(const MessageShapes& shapes);

// The shapes as a tensor of numbers on `device`. Throws UsageError for more tensors or dimensions than fit; `label`
// names the message there.
at::Tensor to_numbers(const MessageShapes& shapes, at::Device device, const std::string& label);
// An uninitialized tensor that receives the result of to_numbers().
at::Tensor empty_numbers(at::Device device);
// The inverse of to_numbers().
MessageShapes from_numbers(const at::Tensor& numbers);

// Memory to receive tensors in, which is used again as soon as nothing else refers to it.
class ReceiveBuffers {
 public:
  // With `reuse` false every buffer is new memory, and none is kept.
  ReceiveBuffers(at::Device device, bool reuse) : device_(device), reuse_(reuse) {}

  // An uninitialized tensor of this shape.
  at::Tensor get(const MessageShape& shape);
  // Gives back the buffers that nothing refers to and that have none of these shapes.
  void keep_only(const MessageShapes& shapes);
  // The size of all buffers that are kept, used or free.
  int64_t bytes() const;

 private:
  at::Device device_;
  bool reuse_;
  std::vector<at::Tensor> buffers_;
};

}  // namespace ds::pipeline
