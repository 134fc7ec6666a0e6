// Some elements that a kernel reads and writes in one access. For kernels of a device and for what stands for them on
// the host. Torch-free; a compiler of kernels reads it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/numbers/float_bits.h"

namespace ds {

// The wide type of a format.
template <class Format>
using WideOf = decltype(Format::decode(typename Format::Bits()));

// Sixteen bytes of the format.
template <class Format>
constexpr int kWholePack = 16 / sizeof(typename Format::Bits);

template <class T, int kPack>
struct Pack {
  T of[kPack];
};

// In memory, read and written in one access.
template <class Bits, int kPack>
struct alignas(sizeof(Bits) * kPack) StoredPack {
  Bits of[kPack];
};

// Bytes as they are.
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
