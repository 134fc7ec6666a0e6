// SwiGLU of a pack of elements (row_rules.h); formulas are those of swiglu_kernel.h.
#pragma once

#include <cstdint>

#include "ops/kernels/row_rules.h"
#include "ops/kernels/swiglu_kernel.h"

namespace ds::ops {

// Rows of one length; row r of array a begins at element r * strides[a].
struct RowsOf {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t strides[5] = {0, 0, 0, 0, 0};  // in the order of the arrays' fields
};

// 1 / (1 + exp(-v)): 0 where exp(-v) is infinite.
template <class T>
DS_HOST_DEVICE T sigmoid_of(T v) {
  return T(1) / (T(1) + exponential_of(-v));
}

// Pack `i` of row `row`.
template <class Format, int kPack>
DS_HOST_DEVICE void swiglu_forward_pack(const SwigluForward& arrays, const RowsOf& of, int64_t row, int64_t i) {
  const auto gate = load_pack<Format, kPack>(row_at<Format>(arrays.gate, row, of.strides[0]), i);
  auto values = load_pack<Format, kPack>(row_at<Format>(arrays.up, row, of.strides[1]), i);
  for (int e = 0; e < kPack; ++e) values.of[e] *= gate.of[e] * sigmoid_of(gate.of[e]);
  store_pack<Format, kPack>(row_at<Format>(arrays.output, row, of.strides[2]), i, values);
}

template <class Format, int kPack>
DS_HOST_DEVICE void swiglu_backward_pack(const SwigluBackward& arrays, const RowsOf& of, int64_t row, int64_t i) {
  const auto dy = load_pack<Format, kPack>(row_at<Format>(arrays.output_gradient, row, of.strides[0]), i);
  auto gate = load_pack<Format, kPack>(row_at<Format>(arrays.gate, row, of.strides[1]), i);
  auto up = load_pack<Format, kPack>(row_at<Format>(arrays.up, row, of.strides[2]), i);
  for (int e = 0; e < kPack; ++e) {
    const auto s = sigmoid_of(gate.of[e]);
    const auto gated = gate.of[e] * s;
    const auto slope = s + multiply_add(-gated, s, gated);  // s (1 + g (1 - s))
    gate.of[e] = dy.of[e] * up.of[e] * slope;
    up.of[e] = dy.of[e] * gated;
  }
  store_pack<Format, kPack>(row_at<Format>(arrays.gate_gradient, row, of.strides[3]), i, gate);
  store_pack<Format, kPack>(row_at<Format>(arrays.up_gradient, row, of.strides[4]), i, up);
}

}  // namespace ds::ops
