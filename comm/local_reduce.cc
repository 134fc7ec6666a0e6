#include "comm/local_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "comm/collective.h"
#include "core/check.h"

namespace ds::comm {
namespace {

// Elements accumulated at a time: the accumulator stays in the first-level cache.
constexpr int64_t kBlock = 1024;

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, at::BFloat16> || std::is_same_v<T, at::Half>, float, T>;

// Signed overflow wraps like unsigned.
template <class T, class Op>
T wrapping(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    using U = std::conditional_t<(sizeof(T) < sizeof(uint32_t)), uint32_t, std::make_unsigned_t<T>>;
    return static_cast<T>(op(static_cast<U>(a), static_cast<U>(b)));
  } else {
    return static_cast<T>(op(a, b));
  }
}

struct Sum {
  template <class T>
  T operator()(T a, T b) const {
    return wrapping(a, b, std::plus<>());
  }
};
struct Product {
  template <class T>
  T operator()(T a, T b) const {
    return wrapping(a, b, std::multiplies<>());
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return b < a || b != b ? b : a;  // NOLINT: b != b is true for NaN alone
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a < b || b != b ? b : a;  // NOLINT
  }
};
struct Band {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct Bor {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct Bxor {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

template <class T, class Op>
void reduce_blocks(void* destination, const std::vector<const void*>& sources, int64_t count, bool average, Op op) {
  using A = Accumulator<T>;
  std::array<A, kBlock> sum;
  const auto ranks = static_cast<A>(sources.size());
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(first[i]);
    for (size_t r = 1; r < sources.size(); ++r) {
      const T* next = static_cast<const T*>(sources[r]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = op(sum[i], static_cast<A>(next[i]));
    }
    T* out = static_cast<T*>(destination) + begin;
    if (average) {
      for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(sum[i] / ranks);
    }
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(sum[i]);
  }
}

template <class T>
void reduce_typed(void* destination, const std::vector<const void*>& sources, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return reduce_blocks<T>(destination, sources, count, false, Min());
    case ReduceOp::kMax:
      return reduce_blocks<T>(destination, sources, count, false, Max());
    default:
      break;
  }
  if constexpr (!std::is_same_v<T, bool>) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
        return reduce_blocks<T>(destination, sources, count, op == ReduceOp::kAvg, Sum());
      case ReduceOp::kProduct:
        return reduce_blocks<T>(destination, sources, count, false, Product());
      default:
        break;
    }
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case ReduceOp::kBand:
        return reduce_blocks<T>(destination, sources, count, false, Band());
      case ReduceOp::kBor:
        return reduce_blocks<T>(destination, sources, count, false, Bor());
      case ReduceOp::kBxor:
        return reduce_blocks<T>(destination, sources, count, false, Bxor());
      default:
        break;
    }
  }
  ensure(false, "local_reduce gets operations that require_reducible lets pass");
}

}  // namespace

void local_reduce(void* destination, const std::vector<const void*>& sources, int64_t count, at::ScalarType dtype,
                  ReduceOp op) {
  switch (dtype) {
    case at::kFloat:
      return reduce_typed<float>(destination, sources, count, op);
    case at::kDouble:
      return reduce_typed<double>(destination, sources, count, op);
    case at::kBFloat16:
      return reduce_typed<at::BFloat16>(destination, sources, count, op);
    case at::kHalf:
      return reduce_typed<at::Half>(destination, sources, count, op);
    case at::kChar:
      return reduce_typed<int8_t>(destination, sources, count, op);
    case at::kByte:
      return reduce_typed<uint8_t>(destination, sources, count, op);
    case at::kShort:
      return reduce_typed<int16_t>(destination, sources, count, op);
    case at::kInt:
      return reduce_typed<int32_t>(destination, sources, count, op);
    case at::kLong:
      return reduce_typed<int64_t>(destination, sources, count, op);
    case at::kBool:
      return reduce_typed<bool>(destination, sources, count, op);
    default:
      ensure(false, "local_reduce gets data types that require_reducible lets pass");
  }
}

void require_reducible(at::ScalarType dtype, ReduceOp op, const Printable& what) {
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      return require(!bitwise, what, ": expected sum, avg, product, min or max on ", dtype, ", found ", name_of(op),
                     ", which is defined on integers and bool only");
    case at::kChar:
    case at::kByte:
    case at::kShort:
    case at::kInt:
    case at::kLong:
      return;
    case at::kBool:
      return require((bitwise && op != ReduceOp::kBxor) || op == ReduceOp::kMin || op == ReduceOp::kMax, what,
                     ": expected min, max, band or bor on bool, found ", name_of(op), "; convert to an integer type");
    default:
      throw UsageError(cat(what, ": expected float32, float64, bfloat16, float16, int8, uint8, int16, int32, int64 or ",
                           "bool, found ", dtype));
  }
}

}  // namespace ds::comm
