// Which of LibTorch's tensors the kernels take, and their types for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/device_kernels.h"
#include "ops/kernels/float_type.h"

namespace ds::ops {

// Elements: fewer are not worth another thread.
constexpr int64_t kThreadGrain = int64_t{1} << 14;

inline std::optional<FloatType> float_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return FloatType::kFloat32;
    case at::kBFloat16:
      return FloatType::kBFloat16;
    case at::kHalf:
      return FloatType::kFloat16;
    case at::kDouble:
      return FloatType::kFloat64;
    default:
      return std::nullopt;
  }
}

// The dtype of what is computed: float64 for float64, else float32.
inline at::ScalarType wide_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// Whether the kernels of the CPU or of CUDA can have `tensor`; else LibTorch's operators do the work.
inline bool has_kernel(const at::Tensor& tensor) {
  const bool there = (tensor.is_cpu() && tensor.scalar_type() != at::kHalf) ||
                     (tensor.is_cuda() && device_functions<OpsDeviceKernels>() != nullptr);
  return there && tensor.layout() == at::kStrided && float_type(tensor.scalar_type()).has_value();
}

inline bool is_floating(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

// Element `offset` of memory at `data`.
inline const void* element(const void* data, FloatType type, int64_t offset) {
  return static_cast<const char*>(data) + static_cast<size_t>(offset) * bytes_of(type);
}
inline void* element(void* data, FloatType type, int64_t offset) {
  return static_cast<char*>(data) + static_cast<size_t>(offset) * bytes_of(type);
}

}  // namespace ds::ops
