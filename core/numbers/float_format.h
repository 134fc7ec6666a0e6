// Which format of core/numbers/float_bits.h an array has, where only the running program knows. Torch-free; a compiler
// of kernels reads it.
#pragma once

#include <cstdint>

#include "core/numbers/float_bits.h"

namespace ds {

enum class FloatFormat : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Of one number.
constexpr int64_t bytes_of(FloatFormat format) { return format == FloatFormat::kFloat32 ? 4 : 2; }

// use(format), on the host.
template <class Use>
auto with_float_format(FloatFormat format, const Use& use) {
  switch (format) {
    case FloatFormat::kBFloat16:
      return use(BFloat16Bits());
    case FloatFormat::kFloat16:
      return use(Float16Bits());
    case FloatFormat::kFloat32:
      break;
  }
  return use(Float32Bits());
}

}  // namespace ds
