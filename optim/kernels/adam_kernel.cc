#include "optim/kernels/adam_kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/adam_kernel.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include "optim/kernels/slice_pass-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {

template <bool kAmsgrad>
class AdamUpdate {
 public:
  explicit AdamUpdate(const AdamCoefficients& c)
      : c_(c), has_l2_(c.l2 != 0.0F), blend_(c.gradient_share < 0.5F ? c.gradient_share : c.gradient_share - 1.0F) {}

  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D d, hn::Vec<D> w, hn::Vec<D> g, float* const* states, size_t i) const {
    if (has_l2_) g = hn::MulAdd(hn::Set(d, c_.l2), w, g);
    // The mean is taken from its nearer end, as LibTorch's lerp does: exact for shares 0 and 1.
    const auto mean = hn::LoadU(d, states[0] + i);
    const auto near_gradient = hn::Ge(hn::Set(d, c_.gradient_share), hn::Set(d, 0.5F));
    const auto m = hn::MulAdd(hn::Set(d, blend_), hn::Sub(g, mean), hn::IfThenElse(near_gradient, g, mean));
    auto v = hn::Mul(hn::LoadU(d, states[1] + i), hn::Set(d, c_.beta2));
    v = hn::MulAdd(hn::Mul(hn::Set(d, c_.square_share), g), g, v);
    hn::StoreU(m, d, states[0] + i);
    hn::StoreU(v, d, states[1] + i);
    if constexpr (kAmsgrad) {
      const auto largest = hn::LoadU(d, states[2] + i);
      v = hn::IfThenElse(hn::Lt(v, largest), largest, v);  // a NaN in v stays
      hn::StoreU(v, d, states[2] + i);
    }
    const auto divisor = hn::Add(hn::Sqrt(v), hn::Set(d, c_.eps));
    const auto step = hn::Div(hn::Mul(hn::Set(d, c_.step_size), m), divisor);
    return hn::Sub(hn::Mul(w, hn::Set(d, c_.master_decay)), step);
  }

 private:
  AdamCoefficients c_;
  bool has_l2_;
  float blend_;
};

void adam_pass(const AdamCoefficients& coefficients, const SliceArrays& arrays, size_t begin, size_t end) {
  if (coefficients.amsgrad) return slice_pass(AdamUpdate<true>(coefficients), arrays, begin, end);
  slice_pass(AdamUpdate<false>(coefficients), arrays, begin, end);
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::optimizers {

HWY_EXPORT(adam_pass);

void adam_kernel(const AdamCoefficients& coefficients, const SliceArrays& arrays, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(adam_pass)
  (coefficients, arrays, static_cast<size_t>(begin), static_cast<size_t>(end));
}

}  // namespace ds::optimizers
#endif  // HWY_ONCE
