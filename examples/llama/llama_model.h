// Decoders of the Llama family as one model. Parameters have Hugging Face's names ("model.layers.0.self_attn.q_proj.
// weight"), so weights go in and out unchanged, and the names tell a tensor axis what to split.
//
//   const LlamaConfig config = read_config("Llama-3.2-1B");
//   auto model = std::make_shared<CausalLm>(Build{.config = config, .device = at::kMeta});  // no memory before
//   initialize auto [engine, ...] = ds::engine::initialize({.model = model, .config = ..., .weights = "Llama-3.2-1B"});
//
// Weights are not initialized: they come from files, or start_value() makes them. With Build::lora the linear layers
// that it names have adapters under PEFT's names ("...q_proj.lora_A.weight"), with start values, and all else is
// frozen.
#pragma once

#include <ATen/core/Tensor.h>
#include <dsengine/ops.h>
#include <dsengine/parallel.h>
#include <dsengine/pipeline.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llama_config.h"
#include "lora.h"

namespace llama {

// Tensors that depend on positions alone, made once for each length and device: rotations, and masks of windows.
class Positions {
 public:
  explicit Positions(const LlamaConfig& config) : rope_(config.rope), head_size_(config.head_size) {}

  // Cosines and sines of the first `length` positions, [length, head_size / 2], float32, as transformers computes them.
  ds::ops::RopeTables tables(int64_t length, at::Device device);
  // [length, length], true where the token of the row sees that of the column.
  at::Tensor window_mask(int64_t length, int64_t window, at::Device device);

 private:
  at::Tensor frequencies() const;

  RopeConfig rope_;
  int64_t head_size_;
  ds::ops::RopeTables tables_;
  at::Tensor mask_;
  int64_t window_ = 0;  // of mask_
};

// How a model, or a layer of it, is built.
struct Build {
  LlamaConfig config;
  at::Device device = at::kCPU;  // kMeta: without memory
  std::optional<LoraConfig> lora = std::nullopt;
  bool recompute = false;  // each layer keeps its input alone, and is computed again in backward (CausalLm)
  std::shared_ptr<Positions> positions = std::make_shared<Positions>(config);
};

// y = x W^T + b, and with an adapter + scale B (A x).
class Linear : public torch::nn::Module, public ds::parallel::HasSplits {
 public:
  struct Shape {
    int64_t in = 0, out = 0;
    bool bias = false;
    ds::parallel::Style style = ds::parallel::Style::kColumn;  // how a tensor axis splits it
    int64_t grain = 1;                                         // parts of a split are multiples of it
  };
  // `name`: its full name in the model, by which adapters are chosen.
  Linear(const Build& build, const std::string& name, const Shape& shape);
  at::Tensor forward(const at::Tensor& x) const;
  // An adapter is split as its layer is; names alone do not say so.
  std::vector<ds::parallel::SplitRule> splits() const override;
  bool is_adapted() const { return lora_a_ != nullptr; }

  at::Tensor weight, bias;

 private:
  Shape shape_;
  double scale_ = 1.0;
  double dropout_ = 0.0;
  std::shared_ptr<Linear> lora_a_, lora_b_;
};

struct RmsNorm : torch::nn::Module {
  RmsNorm(const Build& build, int64_t size);
  at::Tensor forward(const at::Tensor& x) const { return ds::ops::rms_norm(x, weight, eps); }
  at::Tensor weight;
  double eps;
};

struct Embedding : torch::nn::Module {
  explicit Embedding(const Build& build);
  at::Tensor forward(const at::Tensor& tokens) const;
  at::Tensor weight;
  int64_t padding;
};

// Grouped-query attention with rotary positions, and a window where the layer has one.
class Attention : public torch::nn::Module {
 public:
  Attention(const Build& build, int64_t layer);
  at::Tensor forward(const at::Tensor& x) const;  // [batch, time, hidden] to the same

 private:
  at::Tensor rotated(const at::Tensor& heads) const;

  int64_t head_size_, group_, window_;  // group_: queries of a key
  std::shared_ptr<Positions> positions_;
  std::shared_ptr<Linear> q_proj_, k_proj_, v_proj_, o_proj_;
  std::shared_ptr<RmsNorm> q_norm_, k_norm_;  // null without head_norms
};

// SwiGLU.
class Mlp : public torch::nn::Module {
 public:
  Mlp(const Build& build, int64_t layer);
  at::Tensor forward(const at::Tensor& x) const;

 private:
  std::shared_ptr<Linear> gate_proj_, up_proj_, down_proj_;
};

class DecoderLayer : public torch::nn::Module {
 public:
  DecoderLayer(const Build& build, int64_t layer);
  at::Tensor forward(const at::Tensor& x) const;

 private:
  std::shared_ptr<Attention> self_attn_;
  std::shared_ptr<Mlp> mlp_;
  std::shared_ptr<RmsNorm> input_norm_, post_attention_norm_;
};

// The model with its head.
class CausalLm : public torch::nn::Module {
 public:
  explicit CausalLm(const Build& build);
  // The mean loss of the tokens `targets`, one ahead of `tokens`; both [batch, time]. Targets of -100 count nothing.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) const;
  at::Tensor logits(const at::Tensor& tokens) const;  // [batch, time, vocab]

 private:
  at::Tensor hidden(const at::Tensor& tokens) const;

  bool recompute_;
  std::shared_ptr<torch::nn::Module> model_;
  std::shared_ptr<Embedding> embed_tokens_;
  std::vector<std::shared_ptr<DecoderLayer>> layers_;
  std::shared_ptr<RmsNorm> norm_;
  std::shared_ptr<Linear> lm_head_;  // null where the embedding is the head
};

// The same layers under the same names as a pipeline, cut as the ds_config says. It takes tokens, and targets as
// labels.
std::shared_ptr<ds::pipeline::PipelineModule> make_pipeline(const Build& build);

// Fills a parameter of this name with a start value: what transformers, and for adapters PEFT, begin with.
void start_value(const LlamaConfig& config, const std::string& name, const at::Tensor& values);

}  // namespace llama
