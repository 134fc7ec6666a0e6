// The work of the kernels of operators on a device, for one row or one pack of elements: for kernels of a device and
// for what stands for them on the host. With the arithmetic of the vector kernels, in another order of additions. To be
// compiled without fused multiply-adds of the compiler's own. Torch-free; a compiler of kernels reads it.
//
// A team is some lanes that work on a row together. team.each(n, body) calls body(i) for i in [0, n), item i on lane
// i % lanes, and team.sum(n, start, body) adds up on each lane part = body(i, part), from `start` on, and then the
// parts of all lanes (kWarp); every lane gets the sum. Lanes see what they have written themselves. kPack elements are
// read and written at once.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/numbers/float_bits.h"
#include "ops/kernels/float_type.h"

namespace ds::ops {

struct Float64Bits {
  using Bits = double;
  DS_HOST_DEVICE static double decode(double bits) { return bits; }
  DS_HOST_DEVICE static double encode(double value) { return value; }
};

// A format in registers, in memory: what weights, tables and statistics are kept in.
template <class T>
struct WideBits {
  using Bits = T;
  DS_HOST_DEVICE static T decode(T bits) { return bits; }
  DS_HOST_DEVICE static T encode(T value) { return value; }
};

DS_HOST_DEVICE inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DS_HOST_DEVICE inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }
DS_HOST_DEVICE inline float exponential_of(float v) { return expf(v); }
DS_HOST_DEVICE inline double exponential_of(double v) { return exp(v); }
DS_HOST_DEVICE inline float root_of(float v) { return sqrtf(v); }
DS_HOST_DEVICE inline double root_of(double v) { return sqrt(v); }

// Row `row` of [rows, size] at `data`; null where there is no array.
template <class Format>
DS_HOST_DEVICE const void* row_at(const void* data, int64_t row, int64_t size) {
  return data == nullptr ? nullptr : static_cast<const typename Format::Bits*>(data) + row * size;
}
template <class Format>
DS_HOST_DEVICE void* row_at(void* data, int64_t row, int64_t size) {
  return data == nullptr ? nullptr : static_cast<typename Format::Bits*>(data) + row * size;
}

// Two sums of one pass.
template <class T>
struct TwoSums {
  T first, second;
  DS_HOST_DEVICE TwoSums operator+(const TwoSums& other) const { return {first + other.first, second + other.second}; }
};

// Lanes of a team are a multiple of it. Their parts are added in each warp by a butterfly, lane with lane ^ 16, ^ 8, ^
// 4, ^ 2 and ^ 1, then those of the warps one after the other.
constexpr int kWarp = 32;

}  // namespace ds::ops
