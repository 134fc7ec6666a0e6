#include "gpt_model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <string>

#include <dsengine/activation_checkpoint.h>
#include <dsengine/ops.h>
#include <dsengine/sequence_parallel.h>

#include "check.h"

namespace gpt {
namespace {

constexpr double kLayerNormEps = 1e-5;
constexpr int64_t kMlpExpansion = 4;

}  // namespace

void require_valid(const GptConfig& config) {
  for (const auto& [flag, value] :
       {std::pair{"--layers", config.layers}, std::pair{"--hidden", config.hidden}, std::pair{"--heads", config.heads},
        std::pair{"--seq_len", config.seq_len}, std::pair{"--vocab", config.vocab}}) {
    require<ds::ConfigError>(value > 0, flag, ": expected a positive number, found ", value);
  }
  require<ds::ConfigError>(config.hidden % config.heads == 0, "--hidden ", config.hidden,
                           " does not divide by --heads ", config.heads, "; every head takes hidden / heads channels");
}

Linear::Linear(int64_t inputs, int64_t outputs, bool with_bias)
    : weight(register_parameter("weight", at::empty({outputs, inputs}))) {
  if (with_bias) bias = register_parameter("bias", at::empty({outputs}));
}

at::Tensor Linear::forward(const at::Tensor& x) const { return at::linear(x, weight, bias); }

LayerNorm::LayerNorm(int64_t size)
    : weight(register_parameter("weight", at::empty({size}))), bias(register_parameter("bias", at::empty({size}))) {}

at::Tensor LayerNorm::forward(const at::Tensor& x) const {
  return at::layer_norm(x, weight.sizes(), weight, bias, kLayerNormEps);
}

Embedding::Embedding(int64_t count, int64_t size) : weight(register_parameter("weight", at::empty({count, size}))) {}

at::Tensor Embedding::forward(const at::Tensor& indices) const { return at::embedding(weight, indices); }

Attention::Attention(const GptConfig& config)
    : heads(config.heads),
      qkv(register_module("qkv", std::make_shared<Linear>(config.hidden, 3 * config.hidden, true))),
      proj(register_module("proj", std::make_shared<Linear>(config.hidden, config.hidden, true))) {}

at::Tensor Attention::forward(const at::Tensor& x, const ds::ops::SparseSelfAttention* sparse,
                              const SequenceParallel* sequence) const {
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const int64_t hidden = x.size(2);
  // Rows of qkv: query, key, value; the heads lie one behind another inside each.
  const std::vector<at::Tensor> parts = qkv->forward(x).split(hidden, 2);
  const auto split_heads = [&](const at::Tensor& part) {
    return part.view({batch, time, heads, hidden / heads}).transpose(1, 2);
  };
  const at::Tensor query = split_heads(parts[0]);
  const at::Tensor key = split_heads(parts[1]);
  const at::Tensor value = split_heads(parts[2]);
  const at::Tensor mixed = sequence != nullptr ? sequence->attention(query, key, value, {.causal = true})
                           : sparse != nullptr
                               ? (*sparse)(query, key, value, {.causal = true})
                               : at::scaled_dot_product_attention(query, key, value, /*attn_mask=*/{},
                                                                  /*dropout_p=*/0.0, /*is_causal=*/true);
  return proj->forward(mixed.transpose(1, 2).reshape({batch, time, hidden}));
}

Mlp::Mlp(const GptConfig& config)
    : approximate(config.tanh_gelu ? "tanh" : "none"),
      fc(register_module("fc", std::make_shared<Linear>(config.hidden, kMlpExpansion * config.hidden, true))),
      proj(register_module("proj", std::make_shared<Linear>(kMlpExpansion * config.hidden, config.hidden, true))) {}

at::Tensor Mlp::forward(const at::Tensor& x) const { return proj->forward(at::gelu(fc->forward(x), approximate)); }

Block::Block(const GptConfig& config)
    : fused_norms(config.fused_norms),
      ln1(register_module("ln1", std::make_shared<LayerNorm>(config.hidden))),
      attn(register_module("attn", std::make_shared<Attention>(config))),
      ln2(register_module("ln2", std::make_shared<LayerNorm>(config.hidden))),
      mlp(register_module("mlp", std::make_shared<Mlp>(config))) {}

at::Tensor Block::forward(const at::Tensor& x, const ds::ops::SparseSelfAttention* sparse,
                          const SequenceParallel* sequence) const {
  const at::Tensor change = attn->forward(ln1->forward(x), sparse, sequence);
  if (fused_norms) {
    const auto [normed, sum] = ds::ops::add_layer_norm(change, x, ln2->weight, ln2->bias, kLayerNormEps);
    return sum + mlp->forward(normed);
  }
  const at::Tensor attended = x + change;
  return attended + mlp->forward(ln2->forward(attended));
}

Gpt::Gpt(const GptConfig& config) : config_(config) {
  require_valid(config);
  wte_ = register_module("wte", std::make_shared<Embedding>(config.vocab, config.hidden));
  wpe_ = register_module("wpe", std::make_shared<Embedding>(config.seq_len, config.hidden));
  const auto list = register_module("h", std::make_shared<torch::nn::Module>());
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_.push_back(list->register_module(std::to_string(i), std::make_shared<Block>(config)));
  }
  ln_f_ = register_module("ln_f", std::make_shared<LayerNorm>(config.hidden));
  if (!config.tie_embeddings) {
    head_ = register_module("head", std::make_shared<Linear>(config.hidden, config.vocab, false));
  }
  if (config.freeze_embeddings) {
    wte_->weight.set_requires_grad(false);
    wpe_->weight.set_requires_grad(false);
  }
}

at::Tensor Gpt::last_hidden(const at::Tensor& tokens, const at::Tensor& positions,
                            const SequenceParallel* sequence) const {
  at::Tensor x = wte_->forward(tokens) + wpe_->forward(positions);
  for (int64_t i = 0; i < config_.layers; ++i) {
    const auto forward = [block = blocks_[static_cast<size_t>(i)], sparse = drops_.attention,
                          sequence](const at::Tensor& input) { return block->forward(input, sparse.get(), sequence); };
    x = run_block(drops_, i, config_.layers, x, [&](const at::Tensor& input) {
      return config_.activation_checkpointing ? ds::recompute::checkpoint(forward, input) : forward(input);
    });
  }
  return ln_f_->forward(x);
}

at::Tensor Gpt::logits(const at::Tensor& tokens) const {
  return at::linear(last_hidden(tokens, at::arange(tokens.size(1), tokens.options()), nullptr), head_weight());
}

at::Tensor Gpt::forward(const at::Tensor& tokens, const at::Tensor& target) const {
  const at::Tensor targets = target.reshape(tokens.sizes());
  if (sequence_) {  // equally many positions on each rank, all of which count: an addend of the mean over all
    const at::Tensor own = last_hidden(sequence_->shard(tokens), sequence_->positions(tokens.size(1)), sequence_.get());
    return mean_loss(own, sequence_->shard(targets)) / sequence_->size();
  }
  return mean_loss(last_hidden(tokens, at::arange(tokens.size(1), tokens.options()), nullptr), targets);
}

at::Tensor Gpt::mean_loss(const at::Tensor& hidden, const at::Tensor& target) const {
  if (!config_.whole_logits) return ds::ops::linear_cross_entropy(hidden, head_weight(), {}, target);
  const at::Tensor scores = at::linear(hidden, head_weight()).to(at::kFloat);
  return at::cross_entropy_loss(scores.view({-1, config_.vocab}), target.reshape({-1}));
}

}  // namespace gpt
