// Fake quantisation: values of a few levels in the dtype of the tensor. No graph is built here.
//
// A tensor is cut, in its order, into `groups` parts of the same size, each with a scale of its own; b bits:
//   symmetric   s = 2 max|x| / 2^b,     q = clamp(round(x/s + p), -2^(b-1), 2^(b-1) - 1) s
//   asymmetric  s = (max - min) / 2^b,  z = round(min/s) s,  q = clamp(round((x - z)/s + p), 0, 2^b - 1) s + z
//   2 bits, ternary (Li, Liu: Ternary weight networks, 2016)  t = 0.7 mean|x|, a = mean of |x| above t, q in {-a, 0, a}
//   1 bit, binary (Rastegari et al.: XNOR-Net, 2016)          q = sign(x) mean|x|
// p: 0, or in [-1/2, 1/2) for stochastic rounding. A group of equal values (asymmetric) or of zeros stays as it is.
// Tensors of 16 bits are computed in float32. round: to the nearest, halves to even.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ds::model_compression {

struct Levels {
  int64_t bits = 8;
  bool symmetric = true;
  int64_t groups = 1;  // divides the number of elements
  at::Tensor noise;    // p, of the tensor's shape; undefined: 0
};
at::Tensor quantized(const at::Tensor& values, const Levels& levels);
// With the scale of a range that is known before: [2], minimum and maximum.
at::Tensor quantized_in_range(const at::Tensor& values, const at::Tensor& range, int64_t bits, bool symmetric);

// The ceil(ratio n) largest of n scores are true, bool of their shape; of equal ones those that come first.
at::Tensor largest_mask(const at::Tensor& scores, double ratio);

// `values`, whose gradient goes to `source` as it is; of the same shape.
at::Tensor straight_through(const at::Tensor& source, const at::Tensor& values);

}  // namespace ds::model_compression
