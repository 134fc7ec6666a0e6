#include "data/permutation.h"

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "core/splitmix64.h"

namespace ds::engine {
Permutation::Permutation(uint64_t seed, uint64_t epoch, int64_t size) : size_(size) {
  require(size > 0, "permutation: expected at least one sample, found ", size);
  const int bits = std::bit_width(static_cast<uint64_t>(size - 1));
  half_bits_ = std::max(1, (bits + 1) / 2);
  uint64_t key = splitmix64(seed) ^ splitmix64(~epoch);
  for (uint64_t& round_key : keys_) round_key = key = splitmix64(key);
}

uint64_t Permutation::encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (const uint64_t key : keys_) {
    const uint64_t next = left ^ (splitmix64(right ^ key) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t position) const {
  auto value = static_cast<uint64_t>(position);
  do {
    value = encrypt(value);
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

}  // namespace ds::engine
