#include "optim/kernels/adagrad_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/adagrad_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "optim/kernels/slice_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {

struct AdagradUpdate {
  AdagradCoefficients c;

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> w, hn::Vec<D> g, float* const* states, size_t i) const {
    if (c.l2 != 0.0F) g = hn::MulAdd(hn::Set(d, c.l2), w, g);
    const auto sum = hn::MulAdd(g, g, hn::LoadU(d, states[0] + i));
    hn::StoreU(sum, d, states[0] + i);
    const auto divisor = hn::Add(hn::Sqrt(sum), hn::Set(d, c.eps));
    return hn::Sub(w, hn::Div(hn::Mul(hn::Set(d, c.step_size), g), divisor));
  }
};

void adagrad_pass(const AdagradCoefficients& coefficients, const SliceArrays& arrays, size_t begin, size_t end) {
  slice_pass(AdagradUpdate{coefficients}, arrays, begin, end);
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::optimizers {

HWY_EXPORT(adagrad_pass);

void adagrad_kernel(const AdagradCoefficients& coefficients, const SliceArrays& arrays, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(adagrad_pass)
  (coefficients, arrays, static_cast<size_t>(begin), static_cast<size_t>(end));
}

}  // namespace ds::optimizers
#endif  // HWY_ONCE
