// A fault of memory, for tests of checks that look for one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

namespace ds::test {

// Flips a bit of a contiguous tensor on the host, in a way that nothing else sees: no version changes.
inline void flip_bit(const at::Tensor& tensor, size_t bit) {
  static_cast<uint8_t*>(tensor.data_ptr())[bit / 8] ^= static_cast<uint8_t>(1U << bit % 8);
}

}  // namespace ds::test
