// A pseudo-random order that is computed position by position. Torch-free.
//
// A Feistel network over the smallest even power of two that holds the size, walked until it lands below it (Black and
// Rogaway, "Ciphers with arbitrary finite domains"), with SplitMix64 as its round function. It needs no table, so an
// order of any length costs nothing at start, and any position of it is known without those before.
#pragma once

#include <cstdint>

namespace ds::engine {

// A pseudo-random permutation of [0, size), the same on all ranks and platforms.
class Permutation {
 public:
  // `size` > 0.
  Permutation(uint64_t seed, uint64_t epoch, int64_t size);
  // 0 <= position < size.
  int64_t operator()(int64_t position) const;

 private:
  uint64_t encrypt(uint64_t value) const;

  static constexpr int kRounds = 8;
  uint64_t keys_[kRounds];
  int half_bits_;
  int64_t size_;
};

}  // namespace ds::engine
