#include "optim/kernels/square_sum.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/square_sum.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <cstddef>
#include <cstring>

#include "core/numbers/float_formats-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ds::HWY_NAMESPACE::BFloat16;
using ds::HWY_NAMESPACE::Float16;
using ds::HWY_NAMESPACE::Float32;

// Reads four quarters side by side: one core gets more out of the memory by four streams than by one.
template <class Format>
double square_sum_of(const void* values, size_t count) {
  using Raw = typename Format::Raw;
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> d32;
  const size_t lanes = hn::Lanes(d);
  const size_t quarter = count / 4 / lanes * lanes;
  const auto* from = static_cast<const Raw*>(values);
  auto sum0 = hn::Zero(d);
  auto sum1 = sum0, sum2 = sum0, sum3 = sum0;
  const auto add = [d, d32](hn::Vec<decltype(d)> sum, const Raw* at) HWY_ATTR {
    const auto value = hn::PromoteTo(d, Format::load(d32, at));
    return hn::MulAdd(value, value, sum);
  };
  for (size_t i = 0; i < quarter; i += lanes) {
    sum0 = add(sum0, from + i);
    sum1 = add(sum1, from + i + quarter);
    sum2 = add(sum2, from + i + 2 * quarter);
    sum3 = add(sum3, from + i + 3 * quarter);
  }
  for (size_t i = 4 * quarter; i < count; i += lanes) {
    HWY_ALIGN Raw padded[HWY_MAX_BYTES / sizeof(double)] = {};
    std::memcpy(padded, from + i, HWY_MIN(lanes, count - i) * sizeof(Raw));
    sum0 = add(sum0, padded);
  }
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  HWY_ALIGN double parts[HWY_MAX_BYTES / sizeof(double)];
  hn::Store(sum, d, parts);
  double total = 0;
  for (size_t lane = 0; lane < lanes; ++lane) total += parts[lane];
  return total;
}

double square_sum_pass(const void* values, FloatFormat type, size_t count) {
  switch (type) {
    case FloatFormat::kBFloat16:
      return square_sum_of<BFloat16>(values, count);
    case FloatFormat::kFloat16:
      return square_sum_of<Float16>(values, count);
    default:
      return square_sum_of<Float32>(values, count);
  }
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::optimizers {

HWY_EXPORT(square_sum_pass);

double square_sum(const void* values, FloatFormat type, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(square_sum_pass)(values, type, static_cast<size_t>(count));
}

}  // namespace ds::optimizers
#endif  // HWY_ONCE
