// Elements that the vector kernels of operators read and write. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds::ops {

// Numbers in memory. What is computed with them is float32 for the first two and float64 for the last: the "wide" type.
enum class FloatType { kFloat32, kBFloat16, kFloat64 };

inline size_t bytes_of(FloatType type) {
  return type == FloatType::kBFloat16 ? 2 : type == FloatType::kFloat32 ? 4 : 8;
}
inline size_t wide_bytes_of(FloatType type) { return type == FloatType::kFloat64 ? 8 : 4; }

}  // namespace ds::ops
