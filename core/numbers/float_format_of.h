// The kernels' format (core/numbers/float_bits.h) for a tensor's dtype.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "core/numbers/float_bits.h"

namespace ds {

inline std::optional<FloatFormat> float_format_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return FloatFormat::kFloat32;
    case at::kBFloat16:
      return FloatFormat::kBFloat16;
    case at::kHalf:
      return FloatFormat::kFloat16;
    default:
      return std::nullopt;
  }
}

}  // namespace ds
