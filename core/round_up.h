// Sizes rounded up to a multiple. Torch-free.
#pragma once

#include <cstdint>

namespace ds {

// The smallest multiple of `multiple` (> 0) that is not below `value` (>= 0).
constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace ds
