#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

#include "core/check.h"
#include "dsengine/parallel_layers.h"

namespace ds::parallel {
namespace {

// [batch, time, heads x size] to [batch, heads, time, size].
at::Tensor as_heads(const at::Tensor& x, int64_t heads, int64_t size) {
  return x.view({x.size(0), x.size(1), heads, size}).transpose(1, 2);
}

at::Tensor rotated(const at::Tensor& x, const RotaryTables& tables) {
  if (!tables.cos.defined()) return x;
  const int64_t half = x.size(-1) / 2;
  return x * tables.cos + at::cat({-x.slice(-1, half), x.slice(-1, 0, half)}, -1) * tables.sin;
}

// Each head of keys or values for its group of queries.
at::Tensor for_each_query(const at::Tensor& x, int64_t times) {
  if (times == 1) return x;
  const int64_t heads = x.size(1);
  return x.unsqueeze(2)
      .expand({x.size(0), heads, times, x.size(2), x.size(3)})
      .reshape({x.size(0), heads * times, x.size(2), x.size(3)});
}

at::Tensor activated(const at::Tensor& x, const std::string& activation) {
  if (activation == "relu") return at::relu(x);
  if (activation == "silu") return at::silu(x);
  return at::gelu(x, activation == "gelu_tanh" ? "tanh" : "none");
}

}  // namespace

ParallelAttentionImpl::ParallelAttentionImpl(const ParallelAttentionOptions& given) : options(given) {
  require(options.hidden > 0 && options.heads > 0, "a parallel attention: expected hidden and heads above 0, found ",
          options.hidden, " and ", options.heads);
  if (options.kv_heads == 0) options.kv_heads = options.heads;
  require(options.kv_heads > 0 && options.heads % options.kv_heads == 0,
          "a parallel attention: expected kv_heads to divide the ", options.heads, " heads, found ", options.kv_heads);
  require(options.head_size > 0 || options.hidden % options.heads == 0, "a parallel attention: hidden ", options.hidden,
          " does not divide by ", options.heads, " heads; give head_size");
  if (options.head_size == 0) options.head_size = options.hidden / options.heads;
  ParallelAttentionImpl::reset();
}

void ParallelAttentionImpl::reset() {
  const int64_t queries = options.heads * options.head_size;
  const int64_t keys = options.kv_heads * options.head_size;
  const int64_t group = queries / options.kv_heads;  // of the queries of one key
  const auto column = [&](int64_t out, int64_t grain) {
    return ColumnParallelLinear(
        ParallelLinearOptions{.in = options.hidden, .out = out, .bias = options.bias, .grain = grain});
  };
  q_proj = register_module("q_proj", column(queries, group));
  k_proj = register_module("k_proj", column(keys, options.head_size));
  v_proj = register_module("v_proj", column(keys, options.head_size));
  o_proj = register_module("o_proj", RowParallelLinear(ParallelLinearOptions{
                                         .in = queries, .out = options.hidden, .bias = options.bias, .grain = group}));
}

at::Tensor ParallelAttentionImpl::forward(const at::Tensor& x, const at::Tensor& mask,
                                          const RotaryTables& rotary) const {
  require(!options.causal || !mask.defined(), "a parallel attention: a mask excludes options.causal; turn it off and ",
          "put what is causal into the mask");
  const int64_t times = options.heads / options.kv_heads;
  const at::Tensor query = rotated(as_heads(q_proj->forward(x), options.heads, options.head_size), rotary);
  const at::Tensor key = rotated(as_heads(k_proj->forward(x), options.kv_heads, options.head_size), rotary);
  const at::Tensor value = as_heads(v_proj->forward(x), options.kv_heads, options.head_size);
  const at::Tensor mixed =
      at::scaled_dot_product_attention(query, for_each_query(key, times), for_each_query(value, times),
                                       mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt,
                                       is_training() ? options.dropout : 0.0, options.causal);
  return o_proj->forward(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), options.heads * options.head_size}));
}

ParallelMlpImpl::ParallelMlpImpl(const ParallelMlpOptions& given) : options(given) {
  require(options.hidden > 0 && options.inner >= 0, "a parallel MLP: expected sizes above 0, found hidden ",
          options.hidden, " and inner ", options.inner);
  if (options.inner == 0) options.inner = 4 * options.hidden;
  const std::string& name = options.activation;
  require(name == "gelu" || name == "gelu_tanh" || name == "relu" || name == "silu",
          "a parallel MLP: activation: expected gelu, gelu_tanh, relu or silu, found '", name, "'");
  ParallelMlpImpl::reset();
}

void ParallelMlpImpl::reset() {
  const ParallelLinearOptions wide{.in = options.hidden, .out = options.inner, .bias = options.bias};
  if (options.gated) gate_proj = register_module("gate_proj", ColumnParallelLinear(wide));
  up_proj = register_module("up_proj", ColumnParallelLinear(wide));
  down_proj = register_module("down_proj", RowParallelLinear(ParallelLinearOptions{
                                               .in = options.inner, .out = options.hidden, .bias = options.bias}));
}

at::Tensor ParallelMlpImpl::forward(const at::Tensor& x) const {
  const at::Tensor inner = options.gated ? activated(gate_proj->forward(x), options.activation) * up_proj->forward(x)
                                         : activated(up_proj->forward(x), options.activation);
  return down_proj->forward(inner);
}

}  // namespace ds::parallel
