// float32, bfloat16 and float16 in memory, float32 in registers; and float64 in both. Compiled once per instruction set
// (Highway's foreach_target), so its guard is not `#pragma once`.
//
// A format has load(d, from), a vector of Lane, and encode(d, v), the vector to store; `d` is a tag of Lane.
#include <hwy/highway.h>

#include <cstdint>

#if defined(DS_CORE_FLOAT_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DS_CORE_FLOAT_FORMATS_INL_H_
#undef DS_CORE_FLOAT_FORMATS_INL_H_
#else
#define DS_CORE_FLOAT_FORMATS_INL_H_
#endif

// Whether this instruction set converts float16: x86 from AVX2 on (lower is better), 64-bit Arm.
#undef DS_NATIVE_FLOAT16
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || (HWY_ARCH_ARM_A64 && HWY_TARGET < HWY_EMU128)
#define DS_NATIVE_FLOAT16 1
#else
#define DS_NATIVE_FLOAT16 0
#endif

HWY_BEFORE_NAMESPACE();
namespace ds::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Float32 {
  using Lane = float;
  using Raw = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> encode(D /*d*/, hn::Vec<D> v) {
    return v;
  }
};

struct Float64 {
  using Lane = double;
  using Raw = double;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* from) {
    return hn::LoadU(d, from);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> encode(D /*d*/, hn::Vec<D> v) {
    return v;
  }
};

struct BFloat16 {
  using Lane = float;
  using Raw = uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* from) {
    const hn::RebindToUnsigned<D> d32;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(hn::Rebind<Raw, D>(), from))));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<Raw, D>> encode(D d, hn::Vec<D> v) {
    const hn::RebindToSigned<D> d32;
    const auto bits = hn::BitCast(d32, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFF)), odd);
    const auto value = hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(v)), hn::Set(d32, 0x7FC00000), rounded);
    const hn::RebindToUnsigned<D> du32;
    const auto high = hn::ShiftRight<16>(hn::BitCast(du32, value));
    return hn::DemoteTo(hn::Rebind<Raw, D>(), hn::BitCast(d32, high));
  }
};

struct Float16 {
  using Lane = float;
  using Raw = uint16_t;
#if DS_NATIVE_FLOAT16
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* from) {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::BitCast(d16, hn::LoadU(hn::Rebind<Raw, D>(), from)));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<Raw, D>> encode(D /*d*/, hn::Vec<D> v) {
    return hn::BitCast(hn::Rebind<Raw, D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v));
  }
#else
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const Raw* from) {
    const hn::RebindToSigned<D> d32;
    const auto bits = hn::PromoteTo(d32, hn::LoadU(hn::Rebind<Raw, D>(), from));
    const auto magnitude = hn::And(bits, hn::Set(d32, 0x7FFF));
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d32, 0x8000)));
    const auto rebias = hn::Set(d32, 112 << 23);
    auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), rebias);
    normal = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7BFF)), hn::Add(normal, rebias), normal);  // infinity, NaN
    const auto subnormal = hn::BitCast(d32, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24F)));
    const auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x400)), subnormal, normal);
    return hn::BitCast(d, hn::Or(value, sign));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<Raw, D>> encode(D d, hn::Vec<D> v) {
    const hn::RebindToSigned<D> d32;
    const hn::RebindToUnsigned<D> du32;
    const auto magnitude = hn::BitCast(d32, hn::Abs(v));
    const auto sign = hn::BitCast(d32, hn::ShiftRight<16>(hn::And(hn::BitCast(du32, v), hn::Set(du32, 0x80000000U))));
    // The sum with 0.5 has multiples of 2^-24, float16's subnormal step, in its low bits.
    const auto half = hn::Set(d, 0.5F);
    const auto subnormal = hn::Sub(hn::BitCast(d32, hn::Add(hn::Abs(v), half)), hn::BitCast(d32, half));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d32, 1));
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, hn::Set(d32, 0xFFF - (112 << 23))), odd));
    auto value = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d32, 0x38800000)), subnormal, normal);
    value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x477FEFFF)), hn::Set(d32, 0x7C00), value);
    value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d32, 0x7F800000)), hn::Set(d32, 0x7E00), value);
    return hn::DemoteTo(hn::Rebind<Raw, D>(), hn::Or(value, sign));
  }
#endif
};

}  // namespace ds::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // guard per target
