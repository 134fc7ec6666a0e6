// A Llama as a program would write it with torch::nn: rotary positions, grouped heads, q-norm, RMSNorm, SwiGLU.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

namespace ds::parallel {

struct LlamaSizes {
  int64_t hidden = 64, heads = 8, groups = 4, inner = 96, vocabulary = 96, layers = 2;
};

struct RmsNorm : torch::nn::Module {
  explicit RmsNorm(int64_t size) { weight = register_parameter("weight", at::ones({size}) + at::randn({size}) * 0.1); }
  at::Tensor forward(const at::Tensor& x) const { return x * (x.pow(2).mean(-1, true) + 1e-5).rsqrt() * weight; }
  at::Tensor weight;
};

struct LlamaBlock : torch::nn::Module {
  explicit LlamaBlock(const LlamaSizes& sizes) : s(sizes) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
    };
    const int64_t size = s.hidden / s.heads;
    norm1 = register_module("norm1", std::make_shared<RmsNorm>(s.hidden));
    norm2 = register_module("norm2", std::make_shared<RmsNorm>(s.hidden));
    q_norm = register_module("q_norm", std::make_shared<RmsNorm>(size));
    q = linear("q_proj", s.hidden, s.hidden);
    k = linear("k_proj", s.hidden, s.groups * size);
    v = linear("v_proj", s.hidden, s.groups * size);
    o = linear("o_proj", s.hidden, s.hidden);
    gate = linear("gate_proj", s.hidden, s.inner);
    up = linear("up_proj", s.hidden, s.inner);
    down = linear("down_proj", s.inner, s.hidden);
  }

  static at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const int64_t half = x.size(-1) / 2;
    return x * cos + at::cat({-x.slice(-1, half), x.slice(-1, 0, half)}, -1) * sin;
  }
  at::Tensor attend(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const int64_t batch = x.size(0);
    const int64_t time = x.size(1);
    const int64_t size = s.hidden / s.heads;
    const at::Tensor query = rotate(q_norm->forward(q(x).view({batch, time, -1, size})).transpose(1, 2), cos, sin);
    const at::Tensor key = rotate(k(x).view({batch, time, -1, size}).transpose(1, 2), cos, sin);
    const at::Tensor value = v(x).view({batch, time, -1, size}).transpose(1, 2);
    const int64_t times = query.size(1) / key.size(1);
    const auto repeated = [&](const at::Tensor& t) {
      return t.unsqueeze(2).expand({batch, t.size(1), times, time, size}).reshape({batch, -1, time, size});
    };
    const at::Tensor mixed =
        at::scaled_dot_product_attention(query, repeated(key), repeated(value), {}, 0.0, /*is_causal=*/true);
    return o(mixed.transpose(1, 2).contiguous().view({batch, time, -1}));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const at::Tensor middle = x + attend(norm1->forward(x), cos, sin);
    const at::Tensor inner = norm2->forward(middle);
    return middle + down(torch::silu(gate(inner)) * up(inner));
  }

  LlamaSizes s;
  std::shared_ptr<RmsNorm> norm1, norm2, q_norm;
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, gate{nullptr}, up{nullptr}, down{nullptr};
};

struct Llama : torch::nn::Module {
  explicit Llama(const LlamaSizes& sizes = {}) : s(sizes) {
    embedding = register_module("embed_tokens", torch::nn::Embedding(s.vocabulary, s.hidden));
    for (int64_t i = 0; i < s.layers; ++i) {
      blocks.push_back(register_module("layers_" + std::to_string(i), std::make_shared<LlamaBlock>(s)));
    }
    norm = register_module("norm", std::make_shared<RmsNorm>(s.hidden));
    head = register_module("lm_head", torch::nn::Linear(torch::nn::LinearOptions(s.hidden, s.vocabulary).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    const int64_t size = s.hidden / s.heads;
    const at::Tensor inverse = at::pow(10000.0, -at::arange(0, size, 2).to(at::kFloat) / static_cast<double>(size));
    const at::Tensor angle = at::outer(at::arange(tokens.size(1)).to(at::kFloat), inverse);
    const at::Tensor both = at::cat({angle, angle}, -1);
    at::Tensor x = embedding(tokens);
    for (const auto& block : blocks) x = block->forward(x, both.cos(), both.sin());
    return torch::nn::functional::cross_entropy(head(norm->forward(x)).flatten(0, 1), targets.flatten());
  }

  LlamaSizes s;
  torch::nn::Embedding embedding{nullptr};
  std::vector<std::shared_ptr<LlamaBlock>> blocks;
  std::shared_ptr<RmsNorm> norm;
  torch::nn::Linear head{nullptr};
};

}  // namespace ds::parallel
