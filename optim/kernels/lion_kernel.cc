#include "optim/kernels/lion_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/lion_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "optim/kernels/slice_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {

struct LionUpdate {
  LionCoefficients c;

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> w, hn::Vec<D> g, float* const* states, size_t i) const {
    const auto m = hn::LoadU(d, states[0] + i);
    const auto blend = hn::MulAdd(g, hn::Set(d, c.share1), hn::Mul(m, hn::Set(d, c.beta1)));
    hn::StoreU(hn::MulAdd(g, hn::Set(d, c.share2), hn::Mul(m, hn::Set(d, c.beta2))), d, states[0] + i);
    const auto step = hn::CopySign(hn::Set(d, c.lr), blend);
    const auto moves = hn::Gt(hn::Abs(blend), hn::Zero(d));  // elsewhere 0 or NaN
    return hn::Sub(hn::Mul(w, hn::Set(d, c.master_decay)), hn::IfThenElse(moves, step, blend));
  }
};

void lion_pass(const LionCoefficients& coefficients, const SliceArrays& arrays, size_t begin, size_t end) {
  slice_pass(LionUpdate{coefficients}, arrays, begin, end);
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::optimizers {

HWY_EXPORT(lion_pass);

void lion_kernel(const LionCoefficients& coefficients, const SliceArrays& arrays, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(lion_pass)
  (coefficients, arrays, static_cast<size_t>(begin), static_cast<size_t>(end));
}

}  // namespace ds::optimizers
#endif  // HWY_ONCE
