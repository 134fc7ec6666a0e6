#include "llama_model.h"

#include <ATen/ATen.h>
#include <dsengine/activation_checkpoint.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "../gpt/check.h"

namespace llama {
namespace {

using ds::parallel::Style;
using ds::pipeline::LayerSpec;
using gpt::cat;

// A trained parameter without values.
at::Tensor make_parameter(const Build& build, at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions().dtype(at::kFloat).device(build.device)).set_requires_grad(true);
}

bool is_adapter(const std::string& name) { return name.find(".lora_") != std::string::npos; }

void freeze_base(const Build& build, const torch::nn::Module& module) {
  if (!build.lora) return;
  for (const auto& item : module.named_parameters()) {
    if (!is_adapter(cat(".", item.key()))) item.value().set_requires_grad(false);
  }
}

std::string layer_name(int64_t layer) { return cat("model.layers.", layer); }

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor scores = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  return at::cross_entropy_loss(scores.view({-1, scores.size(-1)}), targets.reshape({-1}));
}

Linear::Shape head_shape(const LlamaConfig& config) { return {.in = config.hidden, .out = config.vocab}; }

}  // namespace

at::Tensor Positions::frequencies() const {
  const at::Tensor exponents = at::arange(0, head_size_, 2, at::kFloat) / static_cast<double>(head_size_);
  at::Tensor plain = 1.0 / at::pow(rope_.theta, exponents);
  if (rope_.scaling == RopeConfig::Scaling::kNone) return plain;
  at::Tensor divided = plain / rope_.factor;
  if (rope_.scaling == RopeConfig::Scaling::kLinear) return divided;
  const auto length = static_cast<double>(rope_.original_positions);
  const at::Tensor waves = 2.0 * std::numbers::pi / plain;
  const at::Tensor share = (length / waves - rope_.low_frequency_factor) /
                           (rope_.high_frequency_factor - rope_.low_frequency_factor);  // of the plain frequency
  const at::Tensor blended = (1.0 - share) * divided + share * plain;
  const at::Tensor scaled = at::where(waves > length / rope_.low_frequency_factor, divided, blended);
  return at::where(waves < length / rope_.high_frequency_factor, plain, scaled);
}

ds::ops::RopeTables Positions::tables(int64_t length, at::Device device) {
  const at::NoGradGuard no_grad;
  if (!tables_.cos.defined() || tables_.cos.size(0) < length || tables_.cos.device() != device) {
    const at::Tensor angles = at::arange(length, at::kFloat).unsqueeze(1) * frequencies().unsqueeze(0);
    tables_ = {angles.cos().to(device), angles.sin().to(device)};
  }
  return {tables_.cos.narrow(0, 0, length), tables_.sin.narrow(0, 0, length)};
}

at::Tensor Positions::window_mask(int64_t length, int64_t window, at::Device device) {
  const at::NoGradGuard no_grad;
  if (!mask_.defined() || mask_.size(0) != length || window_ != window || mask_.device() != device) {
    const at::Tensor all = at::ones({length, length}, at::TensorOptions().dtype(at::kBool).device(device));
    mask_ = all.tril().logical_and(all.triu(1 - window));
    window_ = window;
  }
  return mask_;
}

Linear::Linear(const Build& build, const std::string& name, const Shape& shape) : shape_(shape) {
  weight = register_parameter("weight", make_parameter(build, {shape.out, shape.in}));
  if (shape.bias) bias = register_parameter("bias", make_parameter(build, {shape.out}));
  if (!build.lora || !build.lora->targets.contains(name)) return;
  scale_ = build.lora->scale();
  dropout_ = build.lora->dropout;
  const auto adapter = [&](const std::string& part, int64_t in, int64_t out) {
    auto linear =
        register_module(part, std::make_shared<Linear>(build, cat(name, ".", part), Shape{.in = in, .out = out}));
    if (!build.device.is_meta()) start_value(build.config, cat(name, ".", part, ".weight"), linear->weight.detach());
    return linear;
  };
  lora_a_ = adapter("lora_A", shape.in, build.lora->rank);
  lora_b_ = adapter("lora_B", build.lora->rank, shape.out);
}

at::Tensor Linear::forward(const at::Tensor& x) const {
  at::Tensor y = at::linear(x, weight, bias);
  if (!lora_a_) return y;
  return y + lora_b_->forward(lora_a_->forward(at::dropout(x, dropout_, is_training()))) * scale_;
}

std::vector<ds::parallel::SplitRule> Linear::splits() const {
  if (!lora_a_) return {};
  if (shape_.style == Style::kRow) return {{.pattern = "lora_A", .style = Style::kRow, .grain = shape_.grain}};
  return {{.pattern = "lora_B", .style = Style::kColumn, .grain = shape_.grain}};
}

RmsNorm::RmsNorm(const Build& build, int64_t size)
    : weight(register_parameter("weight", make_parameter(build, {size}))), eps(build.config.norm_eps) {}

Embedding::Embedding(const Build& build)
    : weight(register_parameter("weight", make_parameter(build, {build.config.vocab, build.config.hidden}))),
      padding(build.config.padding.value_or(-1)) {
  freeze_base(build, *this);
}

at::Tensor Embedding::forward(const at::Tensor& tokens) const { return at::embedding(weight, tokens, padding); }

Attention::Attention(const Build& build, int64_t layer)
    : head_size_(build.config.head_size),
      group_(build.config.heads / build.config.kv_heads),
      window_(build.config.windows.at(layer)),
      positions_(build.positions) {
  const LlamaConfig& config = build.config;
  const int64_t queries = config.heads * head_size_;
  const int64_t keys = config.kv_heads * head_size_;
  const int64_t grain = group_ * head_size_;  // the queries of one key go together
  const auto linear = [&](const std::string& name, const Linear::Shape& shape) {
    return register_module(name, std::make_shared<Linear>(build, cat(layer_name(layer), ".self_attn.", name), shape));
  };
  q_proj_ = linear("q_proj", {.in = config.hidden, .out = queries, .bias = config.qkv_bias, .grain = grain});
  k_proj_ = linear("k_proj", {.in = config.hidden, .out = keys, .bias = config.qkv_bias, .grain = head_size_});
  v_proj_ = linear("v_proj", {.in = config.hidden, .out = keys, .bias = config.qkv_bias, .grain = head_size_});
  o_proj_ = linear("o_proj",
                   {.in = queries, .out = config.hidden, .bias = config.o_bias, .style = Style::kRow, .grain = grain});
  if (!config.head_norms) return;
  q_norm_ = register_module("q_norm", std::make_shared<RmsNorm>(build, head_size_));
  k_norm_ = register_module("k_norm", std::make_shared<RmsNorm>(build, head_size_));
}

// [batch, heads, time, size]. Split tensors have operators of LibTorch alone.
at::Tensor Attention::rotated(const at::Tensor& heads) const {
  const auto [cos, sin] = positions_->tables(heads.size(2), heads.device());
  if (!ds::parallel::is_split(heads)) return ds::ops::rope(heads, cos, sin);
  const auto whole = [&](const at::Tensor& half) { return at::cat({half, half}, -1).to(heads.scalar_type()); };
  const int64_t half = head_size_ / 2;
  return heads * whole(cos) + at::cat({-heads.slice(-1, half), heads.slice(-1, 0, half)}, -1) * whole(sin);
}

at::Tensor Attention::forward(const at::Tensor& x) const {
  const int64_t batch = x.size(0);
  const int64_t time = x.size(1);
  const auto heads_of = [&](const Linear& linear, const RmsNorm* norm) {
    const at::Tensor heads = linear.forward(x).view({batch, time, -1, head_size_});
    return (norm == nullptr ? heads : norm->forward(heads)).transpose(1, 2);
  };
  const auto for_each_query = [&](const at::Tensor& heads) {
    if (group_ == 1) return heads;
    return heads.unsqueeze(2)
        .expand({batch, heads.size(1), group_, time, head_size_})
        .reshape({batch, heads.size(1) * group_, time, head_size_});
  };
  const at::Tensor query = rotated(heads_of(*q_proj_, q_norm_.get()));
  const at::Tensor key = for_each_query(rotated(heads_of(*k_proj_, k_norm_.get())));
  const at::Tensor value = for_each_query(heads_of(*v_proj_, nullptr));
  const bool sees_all = window_ == 0 || time <= window_;
  const auto mask = sees_all ? std::optional<at::Tensor>() : positions_->window_mask(time, window_, x.device());
  const at::Tensor mixed = at::scaled_dot_product_attention(query, key, value, mask, 0.0, /*is_causal=*/sees_all);
  return o_proj_->forward(mixed.transpose(1, 2).reshape({batch, time, -1}));
}

Mlp::Mlp(const Build& build, int64_t layer) {
  const LlamaConfig& config = build.config;
  const auto linear = [&](const std::string& name, const Linear::Shape& shape) {
    return register_module(name, std::make_shared<Linear>(build, cat(layer_name(layer), ".mlp.", name), shape));
  };
  gate_proj_ = linear("gate_proj", {.in = config.hidden, .out = config.inner, .bias = config.mlp_bias});
  up_proj_ = linear("up_proj", {.in = config.hidden, .out = config.inner, .bias = config.mlp_bias});
  down_proj_ =
      linear("down_proj", {.in = config.inner, .out = config.hidden, .bias = config.mlp_bias, .style = Style::kRow});
}

at::Tensor Mlp::forward(const at::Tensor& x) const {
  const at::Tensor gate = gate_proj_->forward(x);
  const at::Tensor up = up_proj_->forward(x);
  return down_proj_->forward(ds::parallel::is_split(gate) ? at::silu(gate) * up : ds::ops::swiglu(gate, up));
}

DecoderLayer::DecoderLayer(const Build& build, int64_t layer) {
  self_attn_ = register_module("self_attn", std::make_shared<Attention>(build, layer));
  mlp_ = register_module("mlp", std::make_shared<Mlp>(build, layer));
  input_norm_ = register_module("input_layernorm", std::make_shared<RmsNorm>(build, build.config.hidden));
  post_attention_norm_ =
      register_module("post_attention_layernorm", std::make_shared<RmsNorm>(build, build.config.hidden));
  freeze_base(build, *this);
}

at::Tensor DecoderLayer::forward(const at::Tensor& x) const {
  const at::Tensor middle = x + self_attn_->forward(input_norm_->forward(x));
  return middle + mlp_->forward(post_attention_norm_->forward(middle));
}

CausalLm::CausalLm(const Build& build) : recompute_(build.recompute) {
  model_ = register_module("model", std::make_shared<torch::nn::Module>());
  embed_tokens_ = model_->register_module("embed_tokens", std::make_shared<Embedding>(build));
  const auto list = model_->register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  for (int64_t i = 0; i < build.config.layers; ++i) {
    layers_.push_back(std::make_shared<DecoderLayer>(build, i));
    list->push_back(layers_.back());
  }
  norm_ = model_->register_module("norm", std::make_shared<RmsNorm>(build, build.config.hidden));
  if (!build.config.tie_embeddings) {
    lm_head_ = register_module("lm_head", std::make_shared<Linear>(build, "lm_head", head_shape(build.config)));
  }
  freeze_base(build, *this);
}

at::Tensor CausalLm::hidden(const at::Tensor& tokens) const {
  at::Tensor x = embed_tokens_->forward(tokens);
  for (const std::shared_ptr<DecoderLayer>& layer : layers_) {
    const auto run = [layer](const at::Tensor& input) { return layer->forward(input); };
    x = recompute_ && is_training() ? ds::recompute::checkpoint(run, x) : run(x);
  }
  return norm_->forward(x);
}

at::Tensor CausalLm::forward(const at::Tensor& tokens, const at::Tensor& targets) const {
  if (lm_head_ && lm_head_->is_adapted()) return cross_entropy(logits(tokens), targets);
  return ds::ops::linear_cross_entropy(hidden(tokens), lm_head_ ? lm_head_->weight : embed_tokens_->weight, {},
                                       targets);
}

at::Tensor CausalLm::logits(const at::Tensor& tokens) const {
  const at::Tensor x = hidden(tokens);
  return lm_head_ ? lm_head_->forward(x) : at::linear(x, embed_tokens_->weight);
}

std::shared_ptr<ds::pipeline::PipelineModule> make_pipeline(const Build& build) {
  // Tied tables are made alike on their stages before weights are read, which needs memory for them.
  Build of_table = build;
  if (build.config.tie_embeddings) of_table.device = at::kCPU;
  const auto embedding = [of_table] { return std::make_shared<Embedding>(of_table); };
  // A layer of a module that has no layers in it freezes nothing by itself.
  const auto frozen = [build](auto module) {
    freeze_base(build, *module);
    return module;
  };
  const LlamaConfig& config = build.config;
  const std::string table = "model.embed_tokens";
  std::vector<LayerSpec> layers;
  layers.push_back(config.tie_embeddings ? LayerSpec::made_by(embedding).tied_by(table)
                                         : LayerSpec::made_by(embedding).named(table));
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(
        LayerSpec::made_by([build, i] { return std::make_shared<DecoderLayer>(build, i); }).named(layer_name(i)));
  }
  layers.push_back(LayerSpec::made_by([build, frozen, size = config.hidden] {
                     return frozen(std::make_shared<RmsNorm>(build, size));
                   }).named("model.norm"));
  if (config.tie_embeddings) {
    const auto scores = [](const Embedding& words, const at::Tensor& x) { return at::linear(x, words.weight); };
    layers.push_back(LayerSpec::made_by(embedding, scores).tied_by(table));
  } else {
    layers.push_back(LayerSpec::made_by([build, frozen, shape = head_shape(config)] {
                       return frozen(std::make_shared<Linear>(build, "lm_head", shape));
                     }).named("lm_head"));
  }
  ds::pipeline::PipelineOptions options{.loss = cross_entropy};
  if (build.recompute) options.activation_checkpoint_interval = 1;
  return std::make_shared<ds::pipeline::PipelineModule>(std::move(layers), std::move(options));
}

void start_value(const LlamaConfig& config, const std::string& name, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  if (name.ends_with(".lora_A.weight")) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(values.size(1)));  // as torch.nn.Linear begins
    values.uniform_(-bound, bound);
  } else if (name.ends_with(".lora_B.weight") || name.ends_with(".bias")) {
    values.zero_();
  } else if (name.ends_with("norm.weight")) {
    values.fill_(1.0);
  } else {
    values.normal_(0.0, config.initializer_range);
  }
}

}  // namespace llama
