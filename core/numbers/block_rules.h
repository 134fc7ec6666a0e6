// The rules of block_codec.h for one block, for kernels of a device and for what stands for them on the host: to be
// compiled without fused multiply-adds of the compiler's own. Torch-free; a compiler of kernels reads it.
//
// A team is some lanes that work on a block together. team.each(n, body) calls body(i) for i in [0, n), item i on lane
// i % lanes; team.largest(n, body) is the largest body(i), for every lane; team.once(body) calls it on one lane.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/numbers/float_bits.h"

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

// The scale of a block whose largest magnitude has these bits; where it is not above 0, all codes of the block are
// zero.
DS_HOST_DEVICE inline float block_scale(int32_t largest, int levels) {
  constexpr int32_t kInfinity = 0x7F800000;
  if (largest >= kInfinity) return float_of_bits(0x7FC00000U);
  const float magnitude = float_of_bits(static_cast<uint32_t>(largest));
  return magnitude < smallest_magnitude(levels) ? 0.0F : magnitude * per_level(levels);
}

// The format and the sizes of what is encoded: `payload_bytes` of integers, then the scales.
struct BlockArrays {
  FloatFormat format = FloatFormat::kFloat32;  // the format of the values
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

// Encodes block by block, kPack values at a time in whole blocks; the last block writes the zeros between integers and
// scales too.
template <class Format, int kPack>
class BlockEncodeRule {
 public:
  using Bits = typename Format::Bits;
  DS_HOST_DEVICE BlockEncodeRule(const BlockArrays& arrays, const void* values, uint8_t* encoded)
      : arrays_(arrays), values_(static_cast<const Bits*>(values)), encoded_(encoded) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t block, const Team& team) const {
    if (arrays_.length_of(block) == kBlockLength) {
      encode<kPack>(block, kBlockLength, team);
    } else {
      encode<1>(block, arrays_.length_of(block), team);
    }
  }

 private:
  template <int kAtOnce, class Team>
  DS_HOST_DEVICE void encode(int64_t block, int64_t count, const Team& team) const {
    const int64_t half = (count + 1) / 2;
    const Bits* const own = values_ + block * kBlockLength;
    uint8_t* const codes = encoded_ + arrays_.first_byte_of(block);
    const int32_t largest = team.largest(count / kAtOnce, [&](int64_t i) {
      const Pack<float, kAtOnce> values = load_pack<Format, kAtOnce>(own, i);
      int32_t most = 0;
      for (int e = 0; e < kAtOnce; ++e) {
        const int32_t magnitude = magnitude_bits(values.of[e]);
        if (magnitude > most) most = magnitude;
      }
      return most;
    });
    const float scale = block_scale(largest, (1 << (arrays_.bits - 1)) - 1);
    const auto code_of = [&](float value) -> uint32_t {
      return scale > 0.0F ? bits_of_float(value / scale + kRounder) : 0U;
    };
    if (arrays_.bits == 8) {
      team.each(count / kAtOnce, [&](int64_t i) {
        const Pack<float, kAtOnce> values = load_pack<Format, kAtOnce>(own, i);
        Pack<uint8_t, kAtOnce> made;
        for (int e = 0; e < kAtOnce; ++e) made.of[e] = static_cast<uint8_t>(code_of(values.of[e]));
        store_pack<ByteBits, kAtOnce>(codes, i, made);
      });
    } else {
      team.each(half / kAtOnce, [&](int64_t i) {
        const Pack<float, kAtOnce> low = load_pack<Format, kAtOnce>(own, i);
        Pack<float, kAtOnce> high{};  // zero beside the last value of an odd count
        if (kAtOnce > 1 || i + half < count) high = load_pack<Format, kAtOnce>(own + half, i);
        Pack<uint8_t, kAtOnce> made;
        for (int e = 0; e < kAtOnce; ++e) {
          const uint32_t codes_of_both = ((code_of(low.of[e]) + 8U) & 15U) | ((code_of(high.of[e]) + 8U) & 15U) << 4;
          made.of[e] = static_cast<uint8_t>(codes_of_both);
        }
        store_pack<ByteBits, kAtOnce>(codes, i, made);
      });
    }
    team.once([&] {
      reinterpret_cast<float*>(encoded_ + arrays_.payload_bytes)[block] = scale;
      if (block + 1 < arrays_.blocks()) return;
      for (int64_t i = (arrays_.numel * arrays_.bits + 7) / 8; i < arrays_.payload_bytes; ++i) encoded_[i] = 0;
    });
  }

  const BlockArrays& arrays_;
  const Bits* values_;
  uint8_t* encoded_;
};

constexpr int kMostBlockParts = 448;  // arguments of a kernel are limited to 4 KiB

// Encoded parts of one size, in the order in which they are added.
struct BlockParts {
  const uint8_t* of[kMostBlockParts];
  int count;
  float divisor;  // the sum is divided by it
};

// Decodes all parts of a block and adds them up, in registers, kPack values at a time in whole blocks.
template <class Format, int kPack>
class BlockSumRule {
 public:
  using Bits = typename Format::Bits;
  DS_HOST_DEVICE BlockSumRule(const BlockArrays& arrays, const BlockParts& parts, void* values)
      : arrays_(arrays), parts_(parts), values_(static_cast<Bits*>(values)) {}

  template <class Team>
  DS_HOST_DEVICE void operator()(int64_t block, const Team& team) const {
    if (arrays_.length_of(block) == kBlockLength) {
      decode<kPack>(block, kBlockLength, team);
    } else {
      decode<1>(block, arrays_.length_of(block), team);
    }
  }

 private:
  template <int kAtOnce, class Team>
  DS_HOST_DEVICE void decode(int64_t block, int64_t count, const Team& team) const {
    const int64_t half = (count + 1) / 2;
    Bits* const own = values_ + block * kBlockLength;
    if (arrays_.bits == 8) {
      team.each(count / kAtOnce, [&](int64_t i) {
        store_pack<Format, kAtOnce>(own, i,
                                    sums_of<kAtOnce>(block, i, [](uint8_t code) { return static_cast<int8_t>(code); }));
      });
      return;
    }
    team.each(half / kAtOnce, [&](int64_t i) {
      store_pack<Format, kAtOnce>(own, i, sums_of<kAtOnce>(block, i, [](uint8_t codes) { return (codes & 15) - 8; }));
      if (kAtOnce == 1 && i + half >= count) return;
      store_pack<Format, kAtOnce>(own + half, i,
                                  sums_of<kAtOnce>(block, i, [](uint8_t codes) { return (codes >> 4) - 8; }));
    });
  }

  // The sums of the values in pack `i` of the block's bytes.
  template <int kAtOnce, class Integer>
  DS_HOST_DEVICE Pack<float, kAtOnce> sums_of(int64_t block, int64_t i, const Integer& integer) const {
    Pack<float, kAtOnce> sums{};
    for (int part = 0; part < parts_.count; ++part) {
      const uint8_t* const encoded = parts_.of[part];
      const float scale = reinterpret_cast<const float*>(encoded + arrays_.payload_bytes)[block];
      const auto codes = load_pack<ByteBits, kAtOnce>(encoded + arrays_.first_byte_of(block), i);
      for (int e = 0; e < kAtOnce; ++e) {
        const float next = static_cast<float>(integer(codes.of[e])) * scale;
        sums.of[e] = part == 0 ? next : sums.of[e] + next;
      }
    }
    if (parts_.divisor == 1.0F) return sums;
    for (int e = 0; e < kAtOnce; ++e) sums.of[e] /= parts_.divisor;
    return sums;
  }

  const BlockArrays& arrays_;
  const BlockParts& parts_;
  Bits* values_;
};

// Calls use(format, pack) on the host, the latter a std::integral_constant: full packs where values and codes lie
// aligned for them, else one element.
template <class Use>
auto with_block_packs(FloatFormat format, const void* values, const uint8_t* const* encoded, int count,
                      const Use& use) {
  return with_float_format(format, [&](auto of) {
    using Format = decltype(of);
    constexpr int kPack = kWholePack<Format>;
    bool fit = packs_lie_aligned(values, kPack, sizeof(typename Format::Bits));
    for (int part = 0; part < count; ++part) fit = fit && packs_lie_aligned(encoded[part], kPack, 1);
    return fit ? use(of, std::integral_constant<int, kPack>()) : use(of, std::integral_constant<int, 1>());
  });
}

}  // namespace ds
