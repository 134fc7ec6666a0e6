// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) as a hash of a counter.
#pragma once

#include <cstdint>

namespace gpt {

inline uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace gpt
