// One pass over a slice: reads the gradient, applies an optimizer's rule, writes the new weights and their copy.
// Compiled once per instruction set.
//
// A rule is called as rule(d, master, gradient, states, i) -> new master, on vectors; it loads states[..] + i and
// stores them itself. The gradient is multiplied by its scale already.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/numbers/float_formats-inl.h"
#include "optim/kernels/narrow_pass-inl.h"
#include "optim/kernels/slice_arrays.h"

#if defined(DS_OPTIM_KERNELS_SLICE_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_OPTIM_KERNELS_SLICE_PASS_INL_H_
#undef DS_OPTIM_KERNELS_SLICE_PASS_INL_H_
#else
#define DS_OPTIM_KERNELS_SLICE_PASS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::optimizers::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using ds::HWY_NAMESPACE::BFloat16;
using ds::HWY_NAMESPACE::Float16;
using ds::HWY_NAMESPACE::Float32;

// Elements. Four or five arrays are read at once; where the hardware follows them by itself, a twentieth to a tenth of
// the memory's speed is left over (benchmarks/cpu_adam_bench).
constexpr size_t kAhead = 512;

struct NoCopy {
  using Raw = uint8_t;
  static constexpr bool kWrites = false;
};
template <class Format>
struct CopyAs : Format {
  static constexpr bool kWrites = true;
};

template <class Gradient, class Copy>
struct Cursor {
  float* master;
  float* states[3];
  const typename Gradient::Raw* gradient;
  float gradient_scale;
  typename Copy::Raw* copy;

  HWY_INLINE void prefetch(size_t i) const {
    hwy::Prefetch(master + i);
    hwy::Prefetch(gradient + i);
    for (const float* state : states) {
      if (state != nullptr) hwy::Prefetch(state + i);
    }
  }

  template <class Rule>
  HWY_INLINE void step(const Rule& rule, size_t i) const {
    const hn::ScalableTag<float> d;
    const auto g = hn::Mul(Gradient::load(d, gradient + i), hn::Set(d, gradient_scale));
    const auto w = rule(d, hn::LoadU(d, master + i), g, states, i);
    hn::StoreU(w, d, master + i);
    if constexpr (Copy::kWrites) {
      hn::StoreU(Copy::encode(d, w), hn::Rebind<typename Copy::Raw, decltype(d)>(), copy + i);
    }
  }
};

// The last elements, fewer than a vector: the same step on a vector padded with zeros.
template <class Gradient, class Copy, class Rule>
HWY_INLINE void short_step(const Cursor<Gradient, Copy>& all, const Rule& rule, size_t begin, size_t count) {
  constexpr size_t kMost = HWY_MAX_BYTES / sizeof(float);
  HWY_ALIGN float master[kMost] = {};
  HWY_ALIGN float states[3][kMost] = {};
  HWY_ALIGN typename Gradient::Raw gradient[kMost] = {};
  HWY_ALIGN typename Copy::Raw copy[kMost] = {};
  std::memcpy(master, all.master + begin, count * sizeof(float));
  std::memcpy(gradient, all.gradient + begin, count * sizeof(gradient[0]));
  for (size_t s = 0; s < 3; ++s) {
    if (all.states[s] != nullptr) std::memcpy(states[s], all.states[s] + begin, count * sizeof(float));
  }
  const Cursor<Gradient, Copy> padded{master, {states[0], states[1], states[2]}, gradient, all.gradient_scale, copy};
  padded.step(rule, 0);
  std::memcpy(all.master + begin, master, count * sizeof(float));
  for (size_t s = 0; s < 3; ++s) {
    if (all.states[s] != nullptr) std::memcpy(all.states[s] + begin, states[s], count * sizeof(float));
  }
  if constexpr (Copy::kWrites) std::memcpy(all.copy + begin, copy, count * sizeof(copy[0]));
}

template <class Gradient, class Copy, class Rule>
void pass_with(const Rule& shared_rule, const SliceArrays& arrays, size_t begin, size_t end) {
  const Rule rule = shared_rule;  // own, so that its values stay in registers
  const Cursor<Gradient, Copy> cursor{arrays.wide_master(),
                                      {arrays.wide_state(0), arrays.wide_state(1), arrays.wide_state(2)},
                                      static_cast<const typename Gradient::Raw*>(arrays.gradient),
                                      arrays.gradient_scale,
                                      static_cast<typename Copy::Raw*>(arrays.copy)};
  const size_t lanes = hn::Lanes(hn::ScalableTag<float>());
  size_t i = begin;
  const size_t fetched = end - begin > kAhead ? end - kAhead : begin;
  for (; i + lanes <= fetched; i += lanes) {
    cursor.prefetch(i + kAhead);
    cursor.step(rule, i);
  }
  for (; i + lanes <= end; i += lanes) cursor.step(rule, i);
  if (i < end) short_step(cursor, rule, i, end - i);
}

template <class Gradient, class Rule>
void pass_with_gradient(const Rule& rule, const SliceArrays& arrays, size_t begin, size_t end) {
  if (arrays.copy == nullptr) return pass_with<Gradient, NoCopy>(rule, arrays, begin, end);
  switch (arrays.copy_type) {
    case FloatFormat::kFloat32:
      return pass_with<Gradient, CopyAs<Float32>>(rule, arrays, begin, end);
    case FloatFormat::kBFloat16:
      return pass_with<Gradient, CopyAs<BFloat16>>(rule, arrays, begin, end);
    case FloatFormat::kFloat16:
      return pass_with<Gradient, CopyAs<Float16>>(rule, arrays, begin, end);
  }
}

// The pass over masters and states in float32.
template <class Rule>
void wide_pass(const Rule& rule, const SliceArrays& arrays, size_t begin, size_t end) {
  switch (arrays.gradient_type) {
    case FloatFormat::kFloat32:
      return pass_with_gradient<Float32>(rule, arrays, begin, end);
    case FloatFormat::kBFloat16:
      return pass_with_gradient<BFloat16>(rule, arrays, begin, end);
    case FloatFormat::kFloat16:
      return pass_with_gradient<Float16>(rule, arrays, begin, end);
  }
}

// Elements `begin` to `end` - 1.
template <class Rule>
void slice_pass(const Rule& rule, const SliceArrays& arrays, size_t begin, size_t end) {
  if (arrays.is_wide()) return wide_pass(rule, arrays, begin, end);
  narrow_pass(arrays, begin, end, [&](const SliceArrays& block, size_t count) { wide_pass(rule, block, 0, count); });
}

}  // namespace ds::optimizers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard per target
