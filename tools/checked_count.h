// Arithmetic with counts and bytes of models that nobody has built: a result that is too large is an error, and no
// number wraps around. Torch-free.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/check.h"
#include "tools/flag_limits.h"

namespace ds::tool {

// Rounds `bytes` >= 0 to an integer. Throws ConfigError, which calls it `what`, for more than kMostBytes.
inline int64_t whole_bytes(double bytes, const char* what) {
  require<ConfigError>(bytes <= static_cast<double>(kMostBytes), "ds-tool simulate: ", what, ": expected at most 2^60 ",
                       "bytes, found ", bytes, "; check the sizes of the model and of the batch");
  return std::llround(bytes);
}

// Adds two numbers of bytes. Throws ConfigError, which calls the sum `what`, when it does not fit.
inline int64_t checked_sum(int64_t a, int64_t b, const char* what) {
  int64_t sum = 0;
  require<ConfigError>(!__builtin_add_overflow(a, b, &sum), "ds-tool simulate: ", what, ": expected at most 2^63 ",
                       "bytes, found more; check the sizes of the model and of the batch");
  return sum;
}

}  // namespace ds::tool
