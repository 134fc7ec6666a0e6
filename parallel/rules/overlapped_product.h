// A product with a matrix of weights whose weight's gradient is computed beside the sum of the input's gradient over
// the ranks (Megatron-LM's asynchronous tensor-parallel all-reduce; DeepSpeed's tp_overlap_comm).
#pragma once

#include <ATen/core/Tensor.h>

namespace ds::parallel {

// The product's factors: x [..., k], converted (axis/overlap.h), and weights [n, k]; bias [n] or undefined.
struct LayerFactors {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
};

// Whether that can be had: the input's gradient is summed so, and the weight has one.
bool can_overlap(const LayerFactors& factors);
// `product`, the values of x weight^T + bias without a history, with one whose gradients have the bits of at::linear's.
at::Tensor with_overlapped_gradients(const at::Tensor& product, const LayerFactors& factors);

}  // namespace ds::parallel
