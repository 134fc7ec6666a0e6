#include "ops/kernels/swiglu_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kernels/swiglu_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "ops/kernels/row_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::ops::HWY_NAMESPACE {

// 1 / (1 + exp(-v)), and 0 where exp(-v) is beyond what Highway's exp is defined for: less would be nothing but for
// factors near the largest number, and 0 times -infinity is the NaN that it is in LibTorch's. exp(NaN) is 0 there, but
// NaN times anything is what the callers make of it.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> v) {
  using T = hn::TFromD<D>;
  const auto most = hn::Set(d, static_cast<T>(sizeof(T) == 4 ? 88.0 : 700.0));
  const auto one = hn::Set(d, static_cast<T>(1));
  const auto negative = hn::Neg(v);
  const auto beyond = hn::Gt(negative, most);
  const auto argument = hn::IfThenElse(beyond, most, negative);
  return hn::IfThenZeroElse(beyond, hn::Div(one, hn::Add(one, hn::Exp(d, argument))));
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
    const auto gated = hn::Mul(g, sigmoid(Tag<Format>(), g));
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
    const Tag<Format> tag;
    const auto g = part.template load<Format>(gate + i);
    const auto gradient = part.template load<Format>(dy + i);
    const auto s = sigmoid(tag, g);
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
