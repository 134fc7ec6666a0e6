// Elements that the vector kernels of operators read and write. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds::ops {

// Numbers in memory. What is computed with them is float64 for the last and float32 for all else: the "wide" type.
// float16 is for kernels of devices: on the CPU LibTorch's operators have it.
enum class FloatType { kFloat32, kBFloat16, kFloat16, kFloat64 };

inline size_t bytes_of(FloatType type) { return type == FloatType::kFloat64 ? 8 : type == FloatType::kFloat32 ? 4 : 2; }
inline size_t wide_bytes_of(FloatType type) { return type == FloatType::kFloat64 ? 8 : 4; }

}  // namespace ds::ops
