// quantize.h on CUDA tensors: gives raw memory and the current stream to the kernels of libdsengine_cuda.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/fp8/quantize.h"
#include "layers/fp8/quantize_measured.h"

namespace ds::fp8 {

// Whether there are kernels for tensors on this device, and for values of this dtype.
bool has_quantize_kernels(at::Device device);
bool quantize_kernels_take(const at::Tensor& values);

// The functions of quantize.h of these names, on a device. They return when the current stream has the work. Throw
// ConfigError where the device does not take it.
Measured measured_on_device(const at::Tensor& values, at::ScalarType format, const ScaleChoice& choice);
Quantized parts_on_device(const at::Tensor& values, at::ScalarType format, int64_t margin, int64_t rows_of_block);
// [rows, columns] of either format as [columns, rows], contiguous.
at::Tensor transposed_on_device(const at::Tensor& matrix);

}  // namespace ds::fp8
