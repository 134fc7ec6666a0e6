// What block_codec.h says of one block, for kernels of a device and for what stands for them on the host: to be
// compiled without fused multiply-adds of the compiler's own. Torch-free; a compiler of kernels reads it.
//
// A team is some lanes that work on a block together. team.each(n, body) calls body(i) for i in [0, n), item i on lane
// i % lanes; team.largest(n, body) is the largest body(i), for every lane; team.once(body) calls it on one lane.
#pragma once

#include <cstdint>

#include "core/float_bits.h"
#include "core/float_format.h"

namespace ds {

constexpr int64_t kBlockLength = 512;  // values of a block
constexpr uint8_t kZeroPair = 0x88;    // two zeros of 4 bits
// Added to a small number, it leaves the nearest integer in the low bits of the sum.
constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23

// 1 / levels as float32: a product with it is the same on every device, a quotient need not be.
DS_HOST_DEVICE constexpr float per_level(int levels) { return 1.0F / static_cast<float>(levels); }
// Largest magnitudes below this make no scale.
DS_HOST_DEVICE constexpr float smallest_magnitude(int levels) { return static_cast<float>(levels + 1) * 0x1p-126F; }

// The bits of a magnitude, which compare as integers: finite < Inf < NaN.
DS_HOST_DEVICE inline int32_t magnitude_bits(float value) {
  return static_cast<int32_t>(bits_of_float(value) & 0x7FFFFFFFU);
}

// Of a block whose largest magnitude has these bits; not above 0: all its codes are zero.
DS_HOST_DEVICE inline float block_scale(int32_t largest, int levels) {
  constexpr int32_t kInfinity = 0x7F800000;
  if (largest >= kInfinity) return float_of_bits(0x7FC00000U);
  const float magnitude = float_of_bits(static_cast<uint32_t>(largest));
  return magnitude < smallest_magnitude(levels) ? 0.0F : magnitude * per_level(levels);
}

// What is encoded, and how: `payload_bytes` of integers, then the scales.
struct BlockArrays {
  FloatFormat format = FloatFormat::kFloat32;  // of the values
  int bits = 8;                                // or 4
  int64_t numel = 0;
  int64_t payload_bytes = 0;

  DS_HOST_DEVICE int64_t blocks() const { return (numel + kBlockLength - 1) / kBlockLength; }
  DS_HOST_DEVICE int64_t length_of(int64_t block) const {
    const int64_t rest = numel - block * kBlockLength;
    return rest < kBlockLength ? rest : kBlockLength;
  }
  DS_HOST_DEVICE int64_t first_byte_of(int64_t block) const { return block * kBlockLength * bits / 8; }
};

// Encodes block by block; the last one writes the zeros between integers and scales too.
template <class Format>
class BlockEncodeRule {
 public:
  using Bits = typename Format::Bits;
  DS_HOST_DEVICE BlockEncodeRule(const BlockArrays& arrays, const void* values, uint8_t* encoded)
      : arrays_(arrays), values_(static_cast<const Bits*>(values)), encoded_(encoded) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t block, const Team& team) const {
    const int64_t count = arrays_.length_of(block);
    const int64_t half = (count + 1) / 2;
    const Bits* const own = values_ + block * kBlockLength;
    uint8_t* const codes = encoded_ + arrays_.first_byte_of(block);
    const int32_t largest = team.largest(count, [&](int64_t i) { return magnitude_bits(Format::decode(own[i])); });
    const float scale = block_scale(largest, (1 << (arrays_.bits - 1)) - 1);
    const auto code_of = [&](int64_t i) -> uint32_t {
      return scale > 0.0F ? bits_of_float(Format::decode(own[i]) / scale + kRounder) : 0U;
    };
    if (arrays_.bits == 8) {
      team.each(count, [&](int64_t i) { codes[i] = static_cast<uint8_t>(code_of(i)); });
    } else {
      team.each(half, [&](int64_t i) {
        const uint32_t low = (code_of(i) + 8U) & 15U;
        const uint32_t high = i + half < count ? (code_of(i + half) + 8U) & 15U : 8U;
        codes[i] = static_cast<uint8_t>(low | high << 4);
      });
    }
    team.once([&] {
      reinterpret_cast<float*>(encoded_ + arrays_.payload_bytes)[block] = scale;
      if (block + 1 < arrays_.blocks()) return;
      for (int64_t i = (arrays_.numel * arrays_.bits + 7) / 8; i < arrays_.payload_bytes; ++i) encoded_[i] = 0;
    });
  }

 private:
  const BlockArrays& arrays_;
  const Bits* values_;
  uint8_t* encoded_;
};

constexpr int kMostBlockParts = 448;  // arguments of a kernel are limited to 4 KiB

// Encoded parts of one size, in the order in which they are added.
struct BlockParts {
  const uint8_t* of[kMostBlockParts];
  int count;
  float divisor;  // of the sum
};

// Decodes all parts of a block and adds them up, in registers.
template <class Format>
class BlockSumRule {
 public:
  using Bits = typename Format::Bits;
  DS_HOST_DEVICE BlockSumRule(const BlockArrays& arrays, const BlockParts& parts, void* values)
      : arrays_(arrays), parts_(parts), values_(static_cast<Bits*>(values)) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t block, const Team& team) const {
    const int64_t count = arrays_.length_of(block);
    const int64_t half = (count + 1) / 2;
    const int64_t first = arrays_.first_byte_of(block);
    Bits* const own = values_ + block * kBlockLength;
    if (arrays_.bits == 8) {
      team.each(count, [&](int64_t i) {
        own[i] =
            Format::encode(sum_of(block, [&](const uint8_t* part) { return static_cast<int8_t>(part[first + i]); }));
      });
      return;
    }
    team.each(half, [&](int64_t i) {
      own[i] = Format::encode(sum_of(block, [&](const uint8_t* part) { return (part[first + i] & 15) - 8; }));
      if (i + half >= count) return;
      own[i + half] = Format::encode(sum_of(block, [&](const uint8_t* part) { return (part[first + i] >> 4) - 8; }));
    });
  }

 private:
  template <class Integer>
  DS_HOST_DEVICE float sum_of(int64_t block, const Integer& integer) const {
    float sum = 0.0F;
    for (int part = 0; part < parts_.count; ++part) {
      const uint8_t* const encoded = parts_.of[part];
      const float scale = reinterpret_cast<const float*>(encoded + arrays_.payload_bytes)[block];
      const float next = static_cast<float>(integer(encoded)) * scale;
      sum = part == 0 ? next : sum + next;
    }
    return parts_.divisor == 1.0F ? sum : sum / parts_.divisor;
  }

  const BlockArrays& arrays_;
  const BlockParts& parts_;
  Bits* values_;
};

}  // namespace ds
