#include "optim/kernels/square_root.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/square_root.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void square_roots_pass(const float* values, size_t count, float* roots) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::Sqrt(hn::LoadU(d, values + i)), d, roots + i);
  for (; i < count; ++i) roots[i] = std::sqrt(values[i]);
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::optimizers {

HWY_EXPORT(square_roots_pass);

void square_roots(const float* values, int64_t count, float* roots) {
  HWY_DYNAMIC_DISPATCH(square_roots_pass)(values, static_cast<size_t>(count), roots);
}

}  // namespace ds::optimizers
#endif  // HWY_ONCE
