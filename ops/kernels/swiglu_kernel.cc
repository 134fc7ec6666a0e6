#include "ops/kernels/swiglu_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/swiglu_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "ops/kernels/row_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

// 1 / v. For bfloat16 an approximation and one step of Newton's, which has more bits than will be left; a division
// takes half of the time of all the rest.
template <class Format>
HWY_INLINE Vector<Format> reciprocal(Vector<Format> v) {
  const Tag<Format> d;
  if constexpr (std::is_same_v<Format, BFloat16>) {
    const auto near = hn::ApproximateReciprocal(v);
    return hn::Mul(near, hn::NegMulAdd(v, near, hn::Set(d, 2.0F)));
  } else {
    return hn::Div(hn::Set(d, static_cast<typename Format::Lane>(1)), v);
  }
}

// exp(v) for v of -87 to 88. For bfloat16 2^n times a polynomial of the rest, to 3e-6: Highway's takes twice the time
// for bits that will not be left.
template <class Format>
HWY_INLINE Vector<Format> exponential(Vector<Format> v) {
  const Tag<Format> d;
  if constexpr (std::is_same_v<Format, BFloat16>) {
    const hn::RebindToSigned<Tag<Format>> d32;
    const auto power = hn::Mul(v, hn::Set(d, std::numbers::log2e_v<float>));
    const auto whole = hn::Round(power);
    const auto rest = hn::Sub(power, whole);  // in [-0.5, 0.5]
    auto value = hn::Set(d, 0.00133336F);     // log(2)^k / k!, from k = 5 on
    for (const float coefficient : {0.00961813F, 0.05550411F, 0.24022651F, std::numbers::ln2_v<float>, 1.0F}) {
      value = hn::MulAdd(value, rest, hn::Set(d, coefficient));
    }
    const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(d32, whole));
    return hn::BitCast(d, hn::Add(hn::BitCast(d32, value), exponent));
  } else {
    return hn::Exp(d, v);
  }
}

// 1 / (1 + exp(-v)), and 0 where exp(-v) is beyond what exponential() is defined for: less would be nothing but for
// factors near the largest number, and 0 times -infinity is the NaN that it is in LibTorch's. A NaN gives anything, but
// the callers multiply by the NaN again.
template <class Format>
HWY_INLINE Vector<Format> sigmoid(Vector<Format> v) {
  using T = typename Format::Lane;
  const Tag<Format> d;
  const auto most = hn::Set(d, static_cast<T>(sizeof(T) == 4 ? 88.0 : 700.0));
  const auto least = hn::Set(d, static_cast<T>(sizeof(T) == 4 ? -87.0 : -700.0));  // exp() is nothing beside 1
  const auto one = hn::Set(d, static_cast<T>(1));
  const auto negative = hn::Neg(v);
  const auto argument = hn::Max(least, hn::Min(most, negative));
  const auto result = reciprocal<Format>(hn::Add(one, exponential<Format>(argument)));
  return hn::IfThenZeroElse(hn::Gt(negative, most), result);
}

template <class Format>
void forward_of(const SwigluForward& arrays, size_t count) {
  using Raw = typename Format::Raw;
  const Tag<Format> d;
  const auto* gate = static_cast<const Raw*>(arrays.gate);
  const auto* up = static_cast<const Raw*>(arrays.up);
  auto* output = static_cast<Raw*>(arrays.output);
  for_vectors(count, hn::Lanes(d), [=](size_t i, auto /*k*/, auto part) HWY_ATTR {
    const auto g = part.template load<Format>(gate + i);
    const auto gated = hn::Mul(g, sigmoid<Format>(g));
    part.template store<Format>(hn::Mul(gated, part.template load<Format>(up + i)), output + i);
  });
}

template <class Format>
void backward_of(const SwigluBackward& arrays, size_t count) {
  using Raw = typename Format::Raw;
  const Tag<Format> d;
  const auto* dy = static_cast<const Raw*>(arrays.output_gradient);
  const auto* gate = static_cast<const Raw*>(arrays.gate);
  const auto* up = static_cast<const Raw*>(arrays.up);
  auto* gate_gradient = static_cast<Raw*>(arrays.gate_gradient);
  auto* up_gradient = static_cast<Raw*>(arrays.up_gradient);
  for_vectors(count, hn::Lanes(d), [=](size_t i, auto /*k*/, auto part) HWY_ATTR {
    const auto g = part.template load<Format>(gate + i);
    const auto gradient = part.template load<Format>(dy + i);
    const auto s = sigmoid<Format>(g);
    const auto gated = hn::Mul(g, s);
    // s (1 + g (1 - s)) = s + g s - g s s
    const auto slope = hn::Add(s, hn::NegMulAdd(gated, s, gated));
    const auto of_up = hn::Mul(gradient, part.template load<Format>(up + i));
    part.template store<Format>(hn::Mul(of_up, slope), gate_gradient + i);
    part.template store<Format>(hn::Mul(gradient, gated), up_gradient + i);
  });
}

void swiglu_forward_pass(const SwigluForward& arrays, size_t count) {
  with_format(arrays.type, [&](auto format) HWY_ATTR { forward_of<decltype(format)>(arrays, count); });
}

void swiglu_backward_pass(const SwigluBackward& arrays, size_t count) {
  with_format(arrays.type, [&](auto format) HWY_ATTR { backward_of<decltype(format)>(arrays, count); });
}

}  // namespace ds::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::ops {

HWY_EXPORT(swiglu_forward_pass);
HWY_EXPORT(swiglu_backward_pass);

void swiglu_forward(const SwigluForward& arrays, int64_t count) {
  HWY_DYNAMIC_DISPATCH(swiglu_forward_pass)(arrays, static_cast<size_t>(count));
}

void swiglu_backward(const SwigluBackward& arrays, int64_t count) {
  HWY_DYNAMIC_DISPATCH(swiglu_backward_pass)(arrays, static_cast<size_t>(count));
}

}  // namespace ds::ops
#endif  // HWY_ONCE
