// The rules of quantize.h for an element, of its scale and of a part of a matrix, for kernels of a device and for what
// stands for them on the host: to be compiled without fused multiply-adds of the compiler's own. Torch-free; a compiler
// of kernels reads it. Teams are those of core/numbers/block_rules.h.
#pragma once

#include <cstdint>
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#include <cuda_fp8.h>
#endif

#include "core/numbers/block_rules.h"
#include "core/numbers/float_bits.h"

namespace ds::fp8 {

// A format of 8 bits: kMantissa bits of mantissa, exponents from 1 - kBias on. To the nearest, ties to even.
template <int kMantissa, int kBias>
struct EightBits {
  // Of a number within the largest of the format, or NaN.
  DS_HOST_DEVICE static uint8_t encode(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    const uint32_t sign = bits >> 24 & 0x80U;
    if (magnitude > 0x7F800000U) return static_cast<uint8_t>(sign | 0x7FU);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    constexpr __nv_fp8_interpretation_t kFormat = kMantissa == 3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kFormat);
#else
    constexpr int kDropped = 23 - kMantissa;
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
    if (magnitude < kSmallestNormal) {
      // The sum has multiples of the format's subnormal step in its low bits.
      constexpr uint32_t kStep = static_cast<uint32_t>(128 - kBias + kDropped) << 23;
      return static_cast<uint8_t>(sign | (bits_of_float(float_of_bits(magnitude) + float_of_bits(kStep)) - kStep));
    }
    const uint32_t rounded = magnitude + (1U << (kDropped - 1)) - 1U + (magnitude >> kDropped & 1U);
    return static_cast<uint8_t>(sign | ((rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDropped));
#endif
  }
};

struct E4M3Bits : EightBits<3, 7> {
  static constexpr float kLargest = 448.0F;
};
struct E5M2Bits : EightBits<2, 15> {
  static constexpr float kLargest = 57344.0F;
};

enum class EightBitFormat : uint8_t { kFourBitExponent, kFiveBitExponent };  // E4M3, E5M2

// use(format), on the host.
template <class Use>
auto with_eight_bits(EightBitFormat format, const Use& use) {
  return format == EightBitFormat::kFourBitExponent ? use(E4M3Bits()) : use(E5M2Bits());
}

constexpr float kLargestFloat = 0x1.fffffep127F;

// (largest / amax) * shrink; 1 where amax is 0 or not finite.
template <class To>
DS_HOST_DEVICE float scale_of(float amax, float shrink) {
  if (!(amax > 0.0F && amax <= kLargestFloat)) return 1.0F;
  const float scale = To::kLargest / amax * shrink;
  if (scale > kLargestFloat) return kLargestFloat;
  return scale;
}

// 1 / scale, and NaN where the values were not finite.
DS_HOST_DEVICE inline float inverse_of_scale(float scale, float amax) {
  return 1.0F / scale + (amax - amax);  // NOLINT(misc-redundant-expression): NaN where amax is not finite
}

template <class To>
DS_HOST_DEVICE uint8_t eight_bits_of(float value, float scale) {
  float scaled = value * scale;
  if (scaled < -To::kLargest) scaled = -To::kLargest;
  if (scaled > To::kLargest) scaled = To::kLargest;
  return To::encode(scaled);
}

struct QuantizeArrays {
  FloatFormat format = FloatFormat::kFloat32;  // of the values
  EightBitFormat to = EightBitFormat::kFourBitExponent;
  const void* values = nullptr;
  uint8_t* bits = nullptr;  // what they become
  float* inverse = nullptr;
  float shrink = 1.0F;  // of scales made here, 2^-margin
};

// A tensor with one scale.
struct WholeTensor {
  int64_t numel = 0;
  const float* stored = nullptr;  // a scale that is taken where it is above 0; null: none
  bool covers = false;            // ... and takes the largest of the values
  int32_t* amax = nullptr;        // bits of the largest magnitude, 0 before
  float* record = nullptr;        // becomes amax where that is finite and larger; null: nothing does
};

// A tensor is quantised in two passes. The first one finds the largest magnitude and takes the stored scale, if there
// is one, to be good; the second one, where it is not, does it again by the values' own. So mostly it returns at once.
template <class Format, class To>
class WholeQuantizeRule {
 public:
  DS_HOST_DEVICE WholeQuantizeRule(const QuantizeArrays& arrays, const WholeTensor& whole)
      : values_(arrays.values),
        bits_(arrays.bits),
        shrink_(arrays.shrink),
        covers_(whole.covers),
        stored_(whole.stored == nullptr ? 0.0F : *whole.stored) {}

  // Whether packs of kPack elements can be read and written.
  template <int kPack>
  static bool packs_fit(const QuantizeArrays& arrays) {
    return packs_lie_aligned(arrays.values, kPack, sizeof(typename Format::Bits)) &&
           packs_lie_aligned(arrays.bits, kPack, 1);
  }
  // Pack i of the first pass. Returns the bits of its largest magnitude.
  template <int kPack>
  DS_HOST_DEVICE int32_t measure(int64_t i) const {
    const Pack<float, kPack> values = load_pack<Format, kPack>(values_, i);
    if (stored_ > 0.0F) write(i, values, stored_);
    int32_t most = 0;
    for (int e = 0; e < kPack; ++e) {
      const int32_t magnitude = magnitude_bits(values.of[e]);
      if (magnitude > most) most = magnitude;
    }
    return most;
  }
  DS_HOST_DEVICE bool stored_is_good(float amax) const {
    return stored_ > 0.0F && (!covers_ || stored_ * amax <= To::kLargest);
  }
  DS_HOST_DEVICE float scale(float amax) const { return stored_is_good(amax) ? stored_ : scale_of<To>(amax, shrink_); }
  // Pack i of the second pass, if there is one.
  template <int kPack>
  DS_HOST_DEVICE void settle(int64_t i, float scale) const {
    write(i, load_pack<Format, kPack>(values_, i), scale);
  }

 private:
  template <int kPack>
  DS_HOST_DEVICE void write(int64_t i, const Pack<float, kPack>& values, float scale) const {
    Pack<uint8_t, kPack> bits;
    for (int e = 0; e < kPack; ++e) bits.of[e] = eight_bits_of<To>(values.of[e], scale);
    store_pack<ByteBits, kPack>(bits_, i, bits);
  }

  const void* values_;
  uint8_t* bits_;
  float shrink_;
  bool covers_;
  float stored_;
};

// Of what a step remembers of its tensors. A tensor that is not finite says nothing of the next step's.
DS_HOST_DEVICE inline void record_amax(float* record, float amax) {
  if (record != nullptr && amax <= kLargestFloat && amax > *record) *record = amax;
}

constexpr int64_t kPartLength = 128;  // columns that share a scale

// A matrix [rows, columns] in parts of `height` x 128, each with a scale of its own.
struct MatrixParts {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t height = 1;

  DS_HOST_DEVICE int64_t across() const { return columns / kPartLength; }
  DS_HOST_DEVICE int64_t count() const { return rows / height * across(); }
};

// Quantises part by part, each in one pass over memory.
template <class Format, class To>
class PartQuantizeRule {
 public:
  DS_HOST_DEVICE PartQuantizeRule(const QuantizeArrays& arrays, const MatrixParts& parts)
      : arrays_(arrays), parts_(parts) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t part, const Team& team) const {
    const int64_t columns = parts_.columns;
    const int64_t first = part / parts_.across() * parts_.height * columns + part % parts_.across() * kPartLength;
    const auto* const values = static_cast<const typename Format::Bits*>(arrays_.values) + first;
    uint8_t* const bits = arrays_.bits + first;
    const int64_t count = parts_.height * kPartLength;
    const auto place_of = [&](int64_t i) { return i / kPartLength * columns + i % kPartLength; };
    const float amax = float_of_bits(static_cast<uint32_t>(
        team.largest(count, [&](int64_t i) { return magnitude_bits(Format::decode(values[place_of(i)])); })));
    const float scale = scale_of<To>(amax, arrays_.shrink);
    team.each(count,
              [&](int64_t i) { bits[place_of(i)] = eight_bits_of<To>(Format::decode(values[place_of(i)]), scale); });
    team.once([&] { arrays_.inverse[part] = inverse_of_scale(scale, amax); });
  }

 private:
  const QuantizeArrays& arrays_;
  const MatrixParts& parts_;
};

}  // namespace ds::fp8
