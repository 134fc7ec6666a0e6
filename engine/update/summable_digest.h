// Numbers that tell, once ranks have added them up, whether all ranks had the same. An exchange that adds anyway
// compares with them for nothing more.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <cstdint>

namespace ds::engine {

// Sums over up to 4096 ranks of numbers of so many bits, and of their squares, are exact in float64.
constexpr uint64_t kFoldedBits = (uint64_t{1} << 16) - 1;

inline uint64_t folded(uint64_t value) { return (value ^ value >> 16 ^ value >> 32 ^ value >> 48) & kFoldedBits; }

// Puts a folded number, in two values to add up.
inline void put(double* values, uint64_t number) {
  values[0] = static_cast<double>(number);
  values[1] = static_cast<double>(number * number);
}

// Whether all ranks put the same number. W numbers are equal if, and only if, W times the sum of their squares is the
// square of their sum.
inline bool all_equal(const double* sums, int ranks) {
  const auto sum = static_cast<uint64_t>(sums[0]);
  return static_cast<uint64_t>(ranks) * static_cast<uint64_t>(sums[1]) == sum * sum;
}

constexpr int64_t kDigestNumbers = 4;  // values that put_digest() takes

// Puts 32 bits of a digest.
inline void put_digest(double* values, uint64_t digest) {
  put(values, digest & kFoldedBits);
  put(values + 2, digest >> 16 & kFoldedBits);
}

inline bool digests_equal(const double* sums, int ranks) {
  return all_equal(sums, ranks) && all_equal(sums + 2, ranks);
}

// Returns the values of put_digest(): float64 [kDigestNumbers] on the host.
inline at::Tensor summable_digest(uint64_t digest) {
  at::Tensor numbers = at::zeros({kDigestNumbers}, at::kDouble);
  put_digest(numbers.mutable_data_ptr<double>(), digest);
  return numbers;
}

}  // namespace ds::engine
