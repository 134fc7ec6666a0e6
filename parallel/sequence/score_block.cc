#include "parallel/sequence/score_block.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <optional>
#include <tuple>

namespace ds::parallel {
namespace {

constexpr double kUnseen = -std::numeric_limits<double>::infinity();

// The rows of a block, as views; heads of keys and values as many as those of queries.
struct BlockInputs {
  at::Tensor query, key, value;
  std::optional<at::Tensor> mask;  // added to the scores
};

at::Tensor rows_of(const at::Tensor& tensor, int64_t row, int64_t rows) { return tensor.narrow(2, row, rows); }

// LibTorch's kernel has as many heads of keys as of queries in its backward pass.
at::Tensor for_heads(const at::Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}

at::Tensor added_mask(const ScoreBlock& block, at::ScalarType type) {
  return at::zeros(block.seen.sizes(), block.seen.options().dtype(type))
      .masked_fill_(block.seen.logical_not(), kUnseen);
}

BlockInputs inputs_of(const AttentionInputs& inputs, const ScoreBlock& block) {
  const int64_t heads = inputs.query.size(1);
  BlockInputs result{.query = rows_of(inputs.query, block.query_row, block.query_rows),
                     .key = for_heads(rows_of(inputs.key, block.key_row, block.key_rows), heads),
                     .value = for_heads(rows_of(inputs.value, block.key_row, block.key_rows), heads),
                     .mask = {}};
  if (block.seen.defined()) result.mask = added_mask(block, inputs.query.scalar_type()).to(inputs.query.device());
  return result;
}

// On a device without such a kernel.
at::Tensor composed_scores(const BlockInputs& inputs, const ScoreBlock& block, double scale) {
  const at::ScalarType type = sum_type(inputs.query);
  at::Tensor scores = at::matmul(inputs.query.to(type), inputs.key.to(type).transpose(-2, -1)) * scale;
  if (inputs.mask) scores += *inputs.mask;
  if (block.causal) {
    const at::Tensor later = at::ones({block.query_rows, block.key_rows}, scores.options().dtype(at::kBool)).triu_(1);
    scores.masked_fill_(later, kUnseen);
  }
  return scores;
}

struct BlockOutput {
  at::Tensor out, log_sum;
};

BlockOutput attend_block(const BlockInputs& inputs, const ScoreBlock& block, double scale) {
  BlockOutput result;
  if (inputs.query.is_cpu()) {
    std::tie(result.out, result.log_sum) = at::_scaled_dot_product_flash_attention_for_cpu(
        inputs.query, inputs.key, inputs.value, 0.0, block.causal, inputs.mask, scale);
  } else {
    const at::Tensor scores = composed_scores(inputs, block, scale);
    result.log_sum = at::logsumexp(scores, {-1});
    const at::Tensor weights = (scores - result.log_sum.unsqueeze(-1)).exp_().nan_to_num_(0.0);
    result.out = at::matmul(weights, inputs.value.to(weights.scalar_type()));
  }
  if (block.seen.defined()) {
    // The kernel gives 0 for a row that sees nothing.
    const at::Tensor blind = block.seen.any(-1).logical_not().to(result.log_sum.device());
    result.log_sum = result.log_sum.masked_fill(blind, kUnseen);
  }
  return result;
}

}  // namespace

at::ScalarType sum_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

SeenSum::SeenSum(const at::Tensor& query)
    : out_(at::zeros(query.sizes(), query.options().dtype(sum_type(query)))),
      log_sum_(at::full(query.sizes().slice(0, 3), kUnseen, out_.options())) {}

void SeenSum::add(const AttentionInputs& inputs, const ScoreBlock& block) {
  const BlockOutput added = attend_block(inputs_of(inputs, block), block, inputs.scale);
  const at::Tensor out = rows_of(out_, block.query_row, block.query_rows);
  const at::Tensor log_sum = rows_of(log_sum_, block.query_row, block.query_rows);
  // The share of the block in what its queries have seen; minus infinity on both sides: nothing, not NaN.
  const at::Tensor share = at::sigmoid(added.log_sum - log_sum).nan_to_num_(0.0).unsqueeze(-1);
  out.lerp_(added.out.to(out.scalar_type()), share);
  log_sum.copy_(at::logaddexp(log_sum, added.log_sum));
}

at::Tensor SeenSum::log_sum() const { return log_sum_.masked_fill(log_sum_.eq(kUnseen), 0.0); }

void add_block_gradients(const AttentionInputs& inputs, const AttentionResult& result, const ScoreBlock& block,
                         const AttentionGradients& gradients) {
  const BlockInputs own = inputs_of(inputs, block);
  const auto queries = [&](const at::Tensor& tensor) { return rows_of(tensor, block.query_row, block.query_rows); };
  const at::Tensor out = queries(result.out);
  const at::Tensor gradient = queries(result.gradient);
  at::Tensor query, key, value;
  if (own.query.is_cpu()) {
    std::tie(query, key, value) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, own.query, own.key, own.value, out, queries(result.log_sum), 0.0, block.causal, own.mask,
        inputs.scale);
  } else {
    const at::ScalarType type = sum_type(own.query);
    const at::Tensor weights =
        (composed_scores(own, block, inputs.scale) - queries(result.log_sum).unsqueeze(-1)).exp_();
    const at::Tensor wide = gradient.to(type);
    value = at::matmul(weights.transpose(-2, -1), wide);
    const at::Tensor of_weights = at::matmul(wide, own.value.to(type).transpose(-2, -1));
    const at::Tensor of_scores = weights * (of_weights - (wide * out).sum(-1, /*keepdim=*/true)) * inputs.scale;
    query = at::matmul(of_scores, own.key.to(type));
    key = at::matmul(of_scores.transpose(-2, -1), own.query.to(type));
  }
  const auto add_to_keys = [&](const at::Tensor& sum, const at::Tensor& added) {
    const int64_t heads = sum.size(1);
    const at::Tensor wide = added.to(sum.scalar_type());
    rows_of(sum, block.key_row, block.key_rows)
        .add_(added.size(1) == heads ? wide : wide.unflatten(1, {heads, added.size(1) / heads}).sum(2));
  };
  queries(gradients.query).add_(query);
  add_to_keys(gradients.key, key);
  add_to_keys(gradients.value, value);
}

}  // namespace ds::parallel
