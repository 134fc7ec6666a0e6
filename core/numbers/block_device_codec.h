// BlockCodec on CUDA tensors: gives raw memory and the current stream to the kernels of libdsengine_cuda.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ds {

// Whether there are kernels for tensors on this device, and for so many parts at once.
bool block_kernels_take(const at::Tensor& values, size_t parts = 1);

// On tensors that BlockCodec has checked, of at least one value, whose integers take `payload_bytes`. They return when
// the current stream has the work. Throw ConfigError where the device does not take it.
void encode_on_device(const at::Tensor& values, int bits, int64_t payload_bytes, const at::Tensor& encoded);
void decode_sum_on_device(const std::vector<at::Tensor>& parts, int bits, int64_t payload_bytes,
                          const at::Tensor& values, int divisor);

}  // namespace ds
