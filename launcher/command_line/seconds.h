// Converts the seconds of a flag to a duration of the steady clock.
#pragma once

#include <chrono>

namespace ds::launcher {

inline std::chrono::steady_clock::duration in_seconds(double count) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(count));
}

}  // namespace ds::launcher
