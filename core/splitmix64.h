// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). Torch-free.
#pragma once

#include <cstdint>

namespace ds {

constexpr uint64_t kSplitMixGamma = 0x9E3779B97F4A7C15ULL;  // the step of a state

// The output for the state `z`: a bijection of which every output bit depends on every input bit.
constexpr uint64_t splitmix64(uint64_t z) {
  z += kSplitMixGamma;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

}  // namespace ds
