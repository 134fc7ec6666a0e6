// Tensors of the device seen as tensors of the CPU, which share their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {

// Empty, contiguous unless strides are given; of the current stream.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device);
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device);

at::Tensor on_cpu(const at::Tensor& tensor);

// The bytes between the first and the last element.
Access access_of(const at::Tensor& tensor, bool write);

// Points `tensor` at another place of a storage, as aten::set_ does.
void set_place(const at::Tensor& tensor, const c10::Storage& storage, int64_t offset, at::IntArrayRef sizes,
               at::IntArrayRef strides);

at::Tensor make_view(const at::Tensor& base, caffe2::TypeMeta dtype, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides);

// Gives the current stream a task that runs at once, after all that the stream was given before.
Point run_now(c10::Device device, const std::string& name, const std::vector<Access>& accesses,
              std::function<void()> run);

}  // namespace ds::simulated_gpu
