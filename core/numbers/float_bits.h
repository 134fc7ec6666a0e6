// bfloat16 and float16 as bits in memory, float32 in registers: the formats, the choice of one at run time, and packs
// of elements that a kernel reads and writes in one access. For kernels of a device and for what stands for them on the
// host. Torch-free; a compiler of kernels reads it.
//
// Encoding rounds to nearest even, a NaN stays one. The vector code of the host is in
// core/numbers/float_formats-inl.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#define DS_HOST_DEVICE __host__ __device__
#else
#define DS_HOST_DEVICE
#endif

namespace ds {

DS_HOST_DEVICE inline float float_of_bits(uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

DS_HOST_DEVICE inline uint32_t bits_of_float(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A format has Bits, what lies in memory, decode() and encode().
struct Float32Bits {
  using Bits = float;
  DS_HOST_DEVICE static float decode(float bits) { return bits; }
  DS_HOST_DEVICE static float encode(float value) { return value; }
};

struct BFloat16Bits {
  using Bits = uint16_t;
  DS_HOST_DEVICE static float decode(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }
  DS_HOST_DEVICE static uint16_t encode(float value) {
    const uint32_t bits = bits_of_float(value);
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
  }
};

struct Float16Bits {
  using Bits = uint16_t;
#ifdef __CUDA_ARCH__
  __device__ static float decode(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  __device__ static uint16_t encode(float value) {
    return value != value ? uint16_t{0x7E00} : __half_as_ushort(__float2half_rn(value));
  }
#else
  static float decode(uint16_t bits) {
    const uint32_t magnitude = bits & 0x7FFFU;
    const uint32_t sign = (bits & 0x8000U) << 16;
    if (magnitude >= 0x7C00U) return float_of_bits(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
    // The exponent comes to its place by a product with a power of two, which is exact, also for subnormal numbers.
    return float_of_bits(sign | magnitude << 13) * 0x1p112F;
  }
  static uint16_t encode(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
    if (magnitude > 0x7F800000U) return 0x7E00;
    if (magnitude > 0x477FEFFFU) return static_cast<uint16_t>(sign | 0x7C00U);
    if (magnitude <
        0x38800000U) {  // the sum with 0.5 has multiples of 2^-24, float16's subnormal step, in its low bits
      const uint32_t half = bits_of_float(0.5F);
      return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5F) - half));
    }
    return static_cast<uint16_t>(sign | (magnitude - (112U << 23) + 0xFFFU + (magnitude >> 13 & 1U)) >> 13);
  }
#endif
};

// The format that an array has, where only the running program knows.
enum class FloatFormat : uint8_t { kFloat32, kBFloat16, kFloat16 };

// The size of one number.
constexpr int64_t bytes_of(FloatFormat format) { return format == FloatFormat::kFloat32 ? 4 : 2; }

// use(format), on the host.
template <class Use>
auto with_float_format(FloatFormat format, const Use& use) {
  switch (format) {
    case FloatFormat::kBFloat16:
      return use(BFloat16Bits());
    case FloatFormat::kFloat16:
      return use(Float16Bits());
    case FloatFormat::kFloat32:
      break;
  }
  return use(Float32Bits());
}

// The wide type of a format, which its elements have in registers.
template <class Format>
using WideOf = decltype(Format::decode(typename Format::Bits()));

// The number of elements of the format in sixteen bytes.
template <class Format>
constexpr int kWholePack = 16 / sizeof(typename Format::Bits);

template <class T, int kPack>
struct Pack {
  T of[kPack];
};

// A pack as it lies in memory, read and written in one access.
template <class Bits, int kPack>
struct alignas(sizeof(Bits) * kPack) StoredPack {
  Bits of[kPack];
};

// The format of bytes that are taken as they are.
struct ByteBits {
  using Bits = uint8_t;
  DS_HOST_DEVICE static uint8_t decode(uint8_t bits) { return bits; }
  DS_HOST_DEVICE static uint8_t encode(uint8_t bits) { return bits; }
};

// Pack `i` of the elements at `data`, which is aligned for it.
template <class Format, int kPack>
DS_HOST_DEVICE Pack<WideOf<Format>, kPack> load_pack(const void* data, int64_t i) {
  const auto stored = static_cast<const StoredPack<typename Format::Bits, kPack>*>(data)[i];
  Pack<WideOf<Format>, kPack> values;
  for (int e = 0; e < kPack; ++e) values.of[e] = Format::decode(stored.of[e]);
  return values;
}

template <class Format, int kPack>
DS_HOST_DEVICE void store_pack(void* data, int64_t i, const Pack<WideOf<Format>, kPack>& values) {
  StoredPack<typename Format::Bits, kPack> stored;
  for (int e = 0; e < kPack; ++e) stored.of[e] = Format::encode(values.of[e]);
  static_cast<StoredPack<typename Format::Bits, kPack>*>(data)[i] = stored;
}

// Whether packs of `pack` elements of `bytes` bytes each lie aligned in memory at `data`.
inline bool packs_lie_aligned(const void* data, int pack, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % (static_cast<size_t>(pack) * bytes) == 0;
}

}  // namespace ds
