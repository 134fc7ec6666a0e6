// Layers that know how they are split: torch::nn's linear layer and embedding, an attention and an MLP built of them.
//
//   struct Block : torch::nn::Module {
//     ds::parallel::ParallelAttention attention{nullptr};
//     ds::parallel::ParallelMlp mlp{nullptr};
//     ...
//   };
//   auto split = ds::parallel::parallelize_module(*model, mesh["tp"], {});  // no rules: the layers declare them
//
// They are ordinary modules of ordinary operators, with whole weights, and right without a split too: each rank gets
// its part of the weights from parallelize_module, or from the engine. As with torch::nn's modules a holder shares its
// layer, `LayerImpl` is the layer itself. Not safe from several threads at once. Errors are LibTorch's, and UsageError
// for options that make no layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dsengine/parallel.h"

namespace ds::parallel {

struct ParallelLinearOptions {
  int64_t in = 0;
  int64_t out = 0;
  bool bias = true;
  std::vector<int64_t> blocks = {};  // SplitRule::blocks
  int64_t grain = 1;                 // SplitRule::grain
};

// y = x W^T + b, of [..., in] to [..., out]; weight [out, in] and bias [out] as torch::nn::Linear's, with its start
// values.
class ParallelLinearImpl : public torch::nn::Cloneable<ParallelLinearImpl>, public HasSplits {
 public:
  // kColumn or kRow.
  ParallelLinearImpl(const ParallelLinearOptions& given, Style style);

  void reset() override;
  at::Tensor forward(const at::Tensor& x) const;
  std::vector<SplitRule> splits() const override;

  ParallelLinearOptions options;
  at::Tensor weight;
  at::Tensor bias;  // undefined without

 private:
  Style style_;
};

// Each rank computes a part of the outputs. Also the scores of a vocabulary.
class ColumnParallelLinearImpl : public ParallelLinearImpl {
 public:
  explicit ColumnParallelLinearImpl(const ParallelLinearOptions& given) : ParallelLinearImpl(given, Style::kColumn) {}
};
TORCH_MODULE(ColumnParallelLinear);

// Each rank has a part of the inputs; outputs are added over the ranks, the bias once.
class RowParallelLinearImpl : public ParallelLinearImpl {
 public:
  explicit RowParallelLinearImpl(const ParallelLinearOptions& given) : ParallelLinearImpl(given, Style::kRow) {}
};
TORCH_MODULE(RowParallelLinear);

struct VocabParallelEmbeddingOptions {
  int64_t count = 0;                              // entries
  int64_t size = 0;                               // elements of each entry
  std::optional<int64_t> padding = std::nullopt;  // an entry that is zero and gets no gradient
};

// An embedding, from integers [...] to [..., size]; weight [count, size] as torch::nn::Embedding's. Each rank has a
// part of the entries.
class VocabParallelEmbeddingImpl : public torch::nn::Cloneable<VocabParallelEmbeddingImpl>, public HasSplits {
 public:
  explicit VocabParallelEmbeddingImpl(const VocabParallelEmbeddingOptions& given);

  void reset() override;
  at::Tensor forward(const at::Tensor& indices) const;
  std::vector<SplitRule> splits() const override;

  VocabParallelEmbeddingOptions options;
  at::Tensor weight;
};
TORCH_MODULE(VocabParallelEmbedding);

struct ParallelAttentionOptions {
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;   // heads of keys and values, a divisor of heads; 0: as many as heads
  int64_t head_size = 0;  // 0: hidden / heads
  bool bias = true;
  bool causal = true;
  double dropout = 0;  // probability of dropping an attention weight in training
};

// Cosines and sines of positions, [time, head_size] each, for rotary embeddings (arXiv:2104.09864, halves rotated as in
// Llama); undefined: none.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

// Attention of [batch, time, hidden] on itself, with layers q_proj, k_proj, v_proj and o_proj. Ranks have whole heads,
// also where these do not divide evenly, and the queries of a key's group go with it.
class ParallelAttentionImpl : public torch::nn::Cloneable<ParallelAttentionImpl> {
 public:
  explicit ParallelAttentionImpl(const ParallelAttentionOptions& given);

  void reset() override;
  // `mask`: as at::scaled_dot_product_attention's, of [time, time] or [batch, heads, time, time]; not with causal.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& mask = {}, const RotaryTables& rotary = {}) const;

  ParallelAttentionOptions options;
  ColumnParallelLinear q_proj{nullptr};
  ColumnParallelLinear k_proj{nullptr};
  ColumnParallelLinear v_proj{nullptr};
  RowParallelLinear o_proj{nullptr};
};
TORCH_MODULE(ParallelAttention);

struct ParallelMlpOptions {
  int64_t hidden = 0;
  int64_t inner = 0;                // 0: 4 hidden
  std::string activation = "gelu";  // "gelu", "gelu_tanh", "relu", "silu"
  bool gated = false;               // the activation of gate_proj times up_proj, as SwiGLU's
  bool bias = true;
};

// An MLP from [..., hidden] to [..., hidden], with the layers up_proj and down_proj, and gate_proj where gated.
class ParallelMlpImpl : public torch::nn::Cloneable<ParallelMlpImpl> {
 public:
  explicit ParallelMlpImpl(const ParallelMlpOptions& given);

  void reset() override;
  at::Tensor forward(const at::Tensor& x) const;

  ParallelMlpOptions options;
  ColumnParallelLinear gate_proj{nullptr};  // null where not gated
  ColumnParallelLinear up_proj{nullptr};
  RowParallelLinear down_proj{nullptr};
};
TORCH_MODULE(ParallelMlp);

}  // namespace ds::parallel
