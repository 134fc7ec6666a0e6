// Seconds, as flags give them, as a time of the steady clock.
#pragma once

#include <chrono>

namespace ds::launcher {

inline std::chrono::steady_clock::duration in_seconds(double count) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(count));
}

}  // namespace ds::launcher
