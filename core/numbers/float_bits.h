// bfloat16 and float16 as bits in memory, float32 in registers, one element at a time: for kernels of a device and for
// what stands for them on the host. Torch-free; a compiler of kernels reads it.
//
// Encoding rounds to nearest even, a NaN stays one. The vector code of the host is in
// core/numbers/float_formats-inl.h.
#pragma once

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

}  // namespace ds
