// A decoder-only GPT as a plain LibTorch module: nothing in it knows of the engine.
//
// Pre-LayerNorm (eps 1e-5), learned positions, causal scaled-dot-product attention, GELU, no dropout,
// biases on every linear layer but the head. Parameters: wte.weight, wpe.weight, per block h.<i>.{ln1, attn.qkv,
// attn.proj, ln2, mlp.fc, mlp.proj}
// .{weight, bias}, ln_f.{weight, bias}, head.weight (absent when the head is tied to wte).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "drops.h"

namespace ds::engine {
class SequenceParallel;
}

namespace gpt {

using ds::engine::SequenceParallel;

struct GptConfig {
  int64_t layers = 4;
  int64_t hidden = 128;
  int64_t heads = 4;
  int64_t seq_len = 128;  // the longest context
  int64_t vocab = 256;
  bool tie_embeddings = false;
  bool freeze_embeddings = false;         // wte and wpe are not trained, and with them a tied head
  bool tanh_gelu = false;                 // GELU's tanh approximation, as GPT-2's; otherwise exact (erf)
  bool activation_checkpointing = false;  // blocks keep their input only and are computed again in backward
  bool fused_norms = false;               // blocks add and normalize in one operator (dsengine/ops.h)
  bool whole_logits = false;              // forward makes all logits at once, as plain LibTorch; otherwise in chunks
};

// Throws ds::ConfigError for sizes that make no model.
void require_valid(const GptConfig& config);

// The layers below hold what torch::nn's hold, under the same names, but leave their parameters unset: gpt_init.h fills
// them, so that no time goes into random numbers that are thrown away.

struct Linear : torch::nn::Module {
  Linear(int64_t inputs, int64_t outputs, bool with_bias);
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor weight, bias;  // [outputs, inputs], [outputs]
};

struct LayerNorm : torch::nn::Module {
  explicit LayerNorm(int64_t size);
  at::Tensor forward(const at::Tensor& x) const;
  at::Tensor weight, bias;  // [size]
};

struct Embedding : torch::nn::Module {
  Embedding(int64_t count, int64_t size);
  at::Tensor forward(const at::Tensor& indices) const;
  at::Tensor weight;  // [count, size]
};

struct Attention : torch::nn::Module {
  explicit Attention(const GptConfig& config);
  // [batch, time, hidden] -> the same; without `sparse` all earlier positions are seen. With `sequence` x has this
  // rank's positions.
  at::Tensor forward(const at::Tensor& x, const ds::ops::SparseSelfAttention* sparse = nullptr,
                     const SequenceParallel* sequence = nullptr) const;
  int64_t heads;
  std::shared_ptr<Linear> qkv, proj;
};

struct Mlp : torch::nn::Module {
  explicit Mlp(const GptConfig& config);
  at::Tensor forward(const at::Tensor& x) const;
  const char* approximate;  // of at::gelu
  std::shared_ptr<Linear> fc, proj;
};

struct Block : torch::nn::Module {
  explicit Block(const GptConfig& config);
  at::Tensor forward(const at::Tensor& x, const ds::ops::SparseSelfAttention* sparse = nullptr,
                     const SequenceParallel* sequence = nullptr) const;
  bool fused_norms;
  std::shared_ptr<LayerNorm> ln1;
  std::shared_ptr<Attention> attn;
  std::shared_ptr<LayerNorm> ln2;
  std::shared_ptr<Mlp> mlp;
};

class Gpt : public torch::nn::Module {
 public:
  // Parameters are allocated, not initialized. Throws as require_valid().
  explicit Gpt(const GptConfig& config);

  // int64 [batch, time] -> [batch, time, vocab].
  at::Tensor logits(const at::Tensor& tokens) const;
  // Mean cross entropy over all positions, float32; target has the shape of tokens. The logits are never whole, unless
  // the config says so. After cut_sequences() this rank's addend of it: of its own positions.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& target) const;

  const GptConfig& config() const { return config_; }
  // From now on forward leaves these out.
  void leave_out(Drops drops) { drops_ = std::move(drops); }
  // From now on forward computes on this rank's positions of the sequences that it is given; logits() on all of them.
  void cut_sequences(std::shared_ptr<const SequenceParallel> sequence) { sequence_ = std::move(sequence); }

 private:
  // [batch, time, hidden], what the head takes. `sequence`: tokens and positions are those of this rank.
  at::Tensor last_hidden(const at::Tensor& tokens, const at::Tensor& positions, const SequenceParallel* sequence) const;
  at::Tensor mean_loss(const at::Tensor& hidden, const at::Tensor& target) const;
  const at::Tensor& head_weight() const { return head_ ? head_->weight : wte_->weight; }

  GptConfig config_;
  Drops drops_;
  std::shared_ptr<const SequenceParallel> sequence_;  // null: sequences are whole
  std::shared_ptr<Embedding> wte_, wpe_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<LayerNorm> ln_f_;
  std::shared_ptr<Linear> head_;  // null when tied
};

}  // namespace gpt
