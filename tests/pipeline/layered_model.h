// A small language model as a list of layers, its data, and its training by plain torch in one process.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "dsengine/comm.h"
#include "dsengine/engine.h"
#include "dsengine/pipeline.h"
#include "pipeline/stage_placement.h"

namespace ds::pipeline {

constexpr int64_t kVocabulary = 13;
constexpr int64_t kWidth = 16;

// Values that depend on names alone: ranks are threads of one process, which share torch's generator.
inline void fill_by_name(torch::nn::Module& module, const std::string& name) {
  torch::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters()) {
    double phase = 0;
    for (const char c : name + item.key()) phase = phase * 1.7 + c;
    const at::Tensor& parameter = item.value();
    const at::Tensor steps = torch::arange(parameter.numel(), torch::kDouble) * 0.7 + std::fmod(phase, 100.0);
    const double offset = item.key().find("norm.weight") == std::string::npos ? 0.0 : 1.0;
    at::Tensor(parameter).copy_((torch::sin(steps) * 0.1 + offset).view(parameter.sizes()).to(torch::kFloat));
  }
}

struct TokenEmbeddingImpl : torch::nn::Module {
  explicit TokenEmbeddingImpl(std::string name) {
    weight = register_parameter("weight", torch::zeros({kVocabulary, kWidth}));
    fill_by_name(*this, name);
  }
  at::Tensor forward(const at::Tensor& tokens) { return torch::embedding(weight, tokens); }
  at::Tensor weight;
};
TORCH_MODULE(TokenEmbedding);

struct MixerImpl : torch::nn::Module {
  explicit MixerImpl(std::string name) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    wide = register_module("wide", torch::nn::Linear(kWidth, 2 * kWidth));
    narrow = register_module("narrow", torch::nn::Linear(torch::nn::LinearOptions(2 * kWidth, kWidth).bias(false)));
    fill_by_name(*this, name);
  }
  at::Tensor forward(const at::Tensor& x) { return x + narrow(torch::gelu(wide(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear wide{nullptr};
  torch::nn::Linear narrow{nullptr};
};
TORCH_MODULE(Mixer);

struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(std::string name) {
    weight = register_parameter("weight", torch::zeros({kVocabulary, kWidth}));
    fill_by_name(*this, name);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(Head);

inline at::Tensor project(TokenEmbeddingImpl& embedding, const at::Tensor& x) {
  return torch::matmul(x, embedding.weight.t());
}

// Embedding, `depth` mixers, head: tied to the embedding or not.
inline std::vector<LayerSpec> layers_of(int depth, bool tied) {
  std::vector<LayerSpec> layers;
  layers.push_back(tied ? LayerSpec::tied<TokenEmbedding>("embed", "embed")
                        : LayerSpec::of<TokenEmbedding>("embed").named("embed"));
  for (int i = 0; i < depth; ++i) {
    const std::string name = "h." + std::to_string(i);
    layers.push_back(LayerSpec::of<Mixer>(name).named(name));
  }
  layers.push_back(tied ? LayerSpec::tied_with<TokenEmbedding>("embed", project, "embed")
                        : LayerSpec::of<Head>("head").named("head"));
  return layers;
}

inline at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits.view({-1, kVocabulary}), labels.view({-1}));
}

// Tokens [2, 5] of one micro-batch of one data-parallel rank, counted from the start of training.
inline MicroBatch tokens_of(int64_t micro_batch, int data_rank) {
  const at::Tensor steps = torch::arange(10) * 7 + 11 * micro_batch + 5 * data_rank;
  const at::Tensor tokens = (steps * steps + 3 * steps).remainder(kVocabulary).view({2, 5});
  return {.inputs = {tokens}, .labels = {(tokens * 5 + 2).remainder(kVocabulary)}};
}

struct Curve {
  std::vector<double> losses;
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;
};

struct Training {
  int depth = 6;
  bool tied = false;
  int steps = 30;
  int micro_batches = 4;
  int data_ranks = 1;
  double lr = 1e-3;
  double clip = 0.5;
  bool reversed = false;  // plainly: the last micro-batch of the last rank first
};

// Plain torch: one process, every micro-batch of every rank one after another, torch's AdamW.
inline Curve train_plainly(const Training& job) {
  PipelineModule module(layers_of(job.depth, job.tied), {.loss = cross_entropy});
  module.build({});
  torch::optim::AdamW optimizer(module.parameters(), torch::optim::AdamWOptions(job.lr).weight_decay(0.01));
  Curve curve;
  for (int64_t step = 0; step < job.steps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    const int in_all = job.micro_batches * job.data_ranks;
    for (int i = 0; i < in_all; ++i) {
      const int part = job.reversed ? in_all - 1 - i : i;
      const MicroBatch batch = tokens_of(step * job.micro_batches + part / job.data_ranks, part % job.data_ranks);
      const at::Tensor loss = cross_entropy(module.forward(batch.inputs[0]), batch.labels[0]) / in_all;
      loss.backward();
      sum += loss.item<double>();
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(module.parameters(), job.clip));
    optimizer.step();
  }
  for (const auto& item : module.named_parameters()) curve.parameters[item.key()] = item.value().detach().clone();
  return curve;
}

}  // namespace ds::pipeline
