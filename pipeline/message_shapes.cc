#include "pipeline/message_shapes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "core/check.h"

namespace ds::pipeline {
namespace {

// Shapes travel as int64 [kShapeNumbers]: count, then dtype, requires_grad, dimensions and sizes of each tensor.
constexpr int64_t kMostTensors = 16;
constexpr int64_t kMostDimensions = 8;
constexpr int64_t kNumbersOfTensor = 3 + kMostDimensions;
constexpr int64_t kShapeNumbers = 1 + kMostTensors * kNumbersOfTensor;

bool has_shape(const at::Tensor& tensor, const MessageShape& shape) {
  return tensor.scalar_type() == shape.dtype && tensor.sizes() == shape.sizes;
}

}  // namespace

MessageShapes shapes_of(const Tensors& tensors) {
  MessageShapes shapes;
  for (const at::Tensor& tensor : tensors) {
    shapes.push_back({tensor.scalar_type(), tensor.requires_grad(), tensor.sizes().vec()});
  }
  return shapes;
}

std::string text_of(const MessageShapes& shapes) {
  std::string text;
  for (const MessageShape& shape : shapes) {
    text += cat(text.empty() ? "" : ", ", c10::toString(shape.dtype), ' ', at::IntArrayRef(shape.sizes),
                shape.requires_grad ? " with gradient" : "");
  }
  return text;
}

at::Tensor to_numbers(const MessageShapes& shapes, at::Device device, const std::string& label) {
  require(static_cast<int64_t>(shapes.size()) <= kMostTensors, label, ": expected at most ", kMostTensors,
          " tensors between two stages, found ", shapes.size());
  at::Tensor numbers = at::zeros({kShapeNumbers}, at::kLong);
  auto* out = numbers.data_ptr<int64_t>();
  *out++ = static_cast<int64_t>(shapes.size());
  for (const MessageShape& shape : shapes) {
    require(static_cast<int64_t>(shape.sizes.size()) <= kMostDimensions, label, ": expected at most ", kMostDimensions,
            " dimensions, found ", shape.sizes.size());
    out[0] = static_cast<int64_t>(shape.dtype);
    out[1] = shape.requires_grad ? 1 : 0;
    out[2] = static_cast<int64_t>(shape.sizes.size());
    std::copy(shape.sizes.begin(), shape.sizes.end(), out + 3);
    out += kNumbersOfTensor;
  }
  return numbers.to(device);
}

at::Tensor empty_numbers(at::Device device) {
  return at::empty({kShapeNumbers}, at::TensorOptions().dtype(at::kLong).device(device));
}

MessageShapes from_numbers(const at::Tensor& tensor) {
  const at::Tensor numbers = tensor.cpu();
  const auto* in = numbers.const_data_ptr<int64_t>();
  MessageShapes shapes(static_cast<size_t>(*in++));
  for (MessageShape& shape : shapes) {
    shape = {static_cast<at::ScalarType>(in[0]), in[1] != 0, {in + 3, in + 3 + in[2]}};
    in += kNumbersOfTensor;
  }
  return shapes;
}

at::Tensor ReceiveBuffers::get(const MessageShape& shape) {
  const auto options = at::TensorOptions().dtype(shape.dtype).device(device_);
  if (!reuse_) return at::empty(shape.sizes, options);
  for (const at::Tensor& kept : buffers_) {
    if (has_shape(kept, shape) && kept.storage().use_count() == 1) return kept.detach();
  }
  buffers_.push_back(at::empty(shape.sizes, options));
  return buffers_.back().detach();
}

void ReceiveBuffers::keep_only(const MessageShapes& shapes) {
  std::erase_if(buffers_, [&](const at::Tensor& kept) {
    if (kept.storage().use_count() > 1) return false;
    return std::none_of(shapes.begin(), shapes.end(),
                        [&](const MessageShape& shape) { return has_shape(kept, shape); });
  });
}

int64_t ReceiveBuffers::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : buffers_) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace ds::pipeline
