#include "compression/kernels/sign_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "compression/kernels/sign_kernels.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h:
#include <hwy/highway.h>

#include <cstddef>
#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace ds::compression::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, 8>;  // 8 lanes at most: a vector has no more than the bits of one byte
using Vector = hn::Vec<Floats>;
using Mask = hn::Mask<Floats>;
constexpr size_t kMaskBytes = 8;  // that StoreMaskBits and LoadMaskBits may touch

HWY_INLINE unsigned bits_of(Mask mask) {
  uint8_t bytes[kMaskBytes];
  hn::StoreMaskBits(Floats(), mask, bytes);
  return bytes[0];
}

HWY_INLINE Mask mask_of(unsigned bits) {
  const uint8_t bytes[kMaskBytes] = {static_cast<uint8_t>(bits)};
  return hn::LoadMaskBits(Floats(), bytes);
}

// A step works on the 8 values of a byte.

struct EncodeStep {
  Vector plus, minus;

  HWY_INLINE void operator()(float* values, uint8_t* byte) const {
    const Floats d;
    const size_t lanes = hn::Lanes(d);
    unsigned bits = 0;
    for (size_t i = 0; i < 8; i += lanes) {
      const auto v = hn::LoadU(d, values + i);
      const auto positive = hn::Ge(v, hn::Zero(d));
      hn::StoreU(hn::Sub(v, hn::IfThenElse(positive, plus, minus)), d, values + i);
      bits |= bits_of(positive) << i;
    }
    *byte = static_cast<uint8_t>(bits);
  }
};

struct DecodeStep {
  Vector plus, minus;

  HWY_INLINE void operator()(float* values, const uint8_t* byte) const {
    const Floats d;
    const size_t lanes = hn::Lanes(d);
    for (size_t i = 0; i < 8; i += lanes) {
      hn::StoreU(hn::IfThenElse(mask_of(*byte >> i), plus, minus), d, values + i);
    }
  }
};

struct AddStep {
  Vector plus, minus;

  HWY_INLINE void operator()(float* values, const uint8_t* byte) const {
    const Floats d;
    const size_t lanes = hn::Lanes(d);
    for (size_t i = 0; i < 8; i += lanes) {
      const auto v = hn::LoadU(d, values + i);
      hn::StoreU(hn::Add(v, hn::IfThenElse(mask_of(*byte >> i), plus, minus)), d, values + i);
    }
  }
};

// The last values, fewer than 8, go through a copy padded with NaN, whose bits are 0.
template <class Step, class Byte>
HWY_INLINE void sign_pass(float* values, size_t count, float scale, Byte* bits) {
  const Floats d;
  const Step step{hn::Set(d, scale), hn::Set(d, -scale)};
  const size_t whole = count / 8;
  for (size_t byte = 0; byte < whole; ++byte) step(values + 8 * byte, bits + byte);
  const size_t rest = count % 8;
  if (rest == 0) return;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  float padded[8] = {kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN};
  std::memcpy(padded, values + 8 * whole, rest * sizeof(float));
  step(padded, bits + whole);
  std::memcpy(values + 8 * whole, padded, rest * sizeof(float));
}

void encode_signs_pass(float* values, size_t count, float scale, uint8_t* bits) {
  sign_pass<EncodeStep>(values, count, scale, bits);
}

void decode_signs_pass(const uint8_t* bits, size_t count, float scale, float* values) {
  sign_pass<DecodeStep>(values, count, scale, bits);
}

void add_signs_pass(const uint8_t* bits, size_t count, float scale, float* values) {
  sign_pass<AddStep>(values, count, scale, bits);
}

}  // namespace ds::compression::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ds::compression {

HWY_EXPORT(encode_signs_pass);
HWY_EXPORT(decode_signs_pass);
HWY_EXPORT(add_signs_pass);

void encode_signs(float* values, int64_t count, float scale, uint8_t* bits) {
  HWY_DYNAMIC_DISPATCH(encode_signs_pass)(values, static_cast<size_t>(count), scale, bits);
}

void decode_signs(const uint8_t* bits, int64_t count, float scale, float* values) {
  HWY_DYNAMIC_DISPATCH(decode_signs_pass)(bits, static_cast<size_t>(count), scale, values);
}

void add_signs(const uint8_t* bits, int64_t count, float scale, float* values) {
  HWY_DYNAMIC_DISPATCH(add_signs_pass)(bits, static_cast<size_t>(count), scale, values);
}

}  // namespace ds::compression
#endif  // HWY_ONCE
