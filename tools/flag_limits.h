// What flags of several commands accept at most.
#pragma once

#include <cstdint>

namespace ds::tool {

inline constexpr int64_t kMostRanks = 1 << 24;
inline constexpr int64_t kMostParameters = int64_t{1} << 50;

}  // namespace ds::tool
