// Several elements of an array in one access, in any type that kernels know. For the CUDA kernels of this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/numbers/float_bits.h"
#include "optim/kernels/slice_arrays.h"

namespace ds::optimizers {

constexpr int kVector = 4;  // elements

// Elements side by side, in one access.
template <class Bits, int kCount = kVector>
struct alignas(sizeof(Bits) * kCount) Vector {
  Bits of[kCount];
};

template <int kCount = kVector, class Bits>
__device__ Vector<Bits, kCount> load(const Bits* from) {
  return *reinterpret_cast<const Vector<Bits, kCount>*>(from);
}

template <class Bits, int kCount>
__device__ void store(Bits* to, const Vector<Bits, kCount>& values) {
  *reinterpret_cast<Vector<Bits, kCount>*>(to) = values;
}

// use(format) with the format of `type`. The same branch for all threads; what it chooses is kept short, so that the
// arithmetic is there once.
template <class Use>
__device__ void with_format(FloatFormat type, const Use& use) {
  switch (type) {
    case FloatFormat::kFloat32:
      return use(Float32Bits());
    case FloatFormat::kBFloat16:
      return use(BFloat16Bits());
    case FloatFormat::kFloat16:
      return use(Float16Bits());
  }
}

template <int kCount = kVector>
__device__ Vector<float, kCount> load_decoded(const void* data, FloatFormat type, int64_t i) {
  Vector<float, kCount> values;
  with_format(type, [&](auto format) {
    using Format = decltype(format);
    const auto bits = load<kCount>(static_cast<const typename Format::Bits*>(data) + i);
#pragma unroll
    for (int e = 0; e < kCount; ++e) values.of[e] = Format::decode(bits.of[e]);
  });
  return values;
}

template <int kCount>
__device__ void store_encoded(void* data, FloatFormat type, int64_t i, const Vector<float, kCount>& values) {
  with_format(type, [&](auto format) {
    using Format = decltype(format);
    Vector<typename Format::Bits, kCount> bits;
#pragma unroll
    for (int e = 0; e < kCount; ++e) bits.of[e] = Format::encode(values.of[e]);
    store(static_cast<typename Format::Bits*>(data) + i, bits);
  });
}

// Loads masters or states. kNarrow: some of the launch are not float32; without it the code is for float32 alone.
template <bool kNarrow, int kCount = kVector>
__device__ Vector<float, kCount> load_kept(const void* data, FloatFormat type, int64_t i) {
  if constexpr (kNarrow) {
    return load_decoded<kCount>(data, type, i);
  } else {
    return load<kCount>(static_cast<const float*>(data) + i);
  }
}

template <bool kNarrow, int kCount>
__device__ void store_kept(void* data, FloatFormat type, int64_t i, const Vector<float, kCount>& values) {
  if constexpr (kNarrow) {
    store_encoded(data, type, i, values);
  } else {
    store(static_cast<float*>(data) + i, values);
  }
}

__device__ inline bool in_one_access(const void* data, FloatFormat type) {
  const uintptr_t bytes = kVector * (type == FloatFormat::kFloat32 ? sizeof(float) : sizeof(uint16_t));
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether kVector elements of each array lie in one access, from a multiple of kVector on.
__device__ inline bool aligned(const SliceArrays& arrays) {
  bool all = in_one_access(arrays.master, arrays.master_type) && in_one_access(arrays.gradient, arrays.gradient_type) &&
             in_one_access(arrays.copy, arrays.copy_type);
  for (const void* state : arrays.states) all = all && in_one_access(state, arrays.state_type);
  return all;
}

// Blocks that the current device runs at a time, so many of each multiprocessor.
inline cudaError_t find_blocks(int of_a_processor, int64_t& blocks) {
  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  blocks = int64_t{processors} * of_a_processor;
  return error;
}

}  // namespace ds::optimizers
