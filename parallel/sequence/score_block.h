// Attention over one block of scores, and the sum of what several blocks give, as in FlashAttention (arXiv:2205.14135).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "parallel/sequence/position_pieces.h"

namespace ds::parallel {

// The queries, keys and values of one attention, [batch, heads, rows, channels] each.
struct AttentionInputs {
  at::Tensor query, key, value;
  double scale;
};

// What queries have seen so far: `out` is [batch, heads, rows, channels], `log_sum` the logarithm of the sum of
// exp(score), [batch, heads, rows], minus infinity for a query that has seen no key. float32, or float64 of float64.
class SeenSum {
 public:
  explicit SeenSum(const at::Tensor& query);
  // Adds a block of `inputs`.
  void add(const AttentionInputs& inputs, const ScoreBlock& block);
  // The result; log_sum is 0 where a query has seen nothing.
  const at::Tensor& out() const { return out_; }
  at::Tensor log_sum() const;

 private:
  at::Tensor out_, log_sum_;
};

// The result of the forward pass and the gradient of `out`, in the dtype of the inputs.
struct AttentionResult {
  at::Tensor out, log_sum, gradient;
};

// Sums of gradients over blocks, in the dtype of SeenSum.
struct AttentionGradients {
  at::Tensor query, key, value;
};

// Adds what a block gives.
void add_block_gradients(const AttentionInputs& inputs, const AttentionResult& result, const ScoreBlock& block,
                         const AttentionGradients& gradients);

// The dtype of sums over blocks.
at::ScalarType sum_type(const at::Tensor& query);

}  // namespace ds::parallel
