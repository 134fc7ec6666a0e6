// Layers in halves between which an activation is split over a tensor axis, and jobs of pipelines that train them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "dsengine/parallel.h"
#include "tests/pipeline/layered_model.h"
#include "tests/support/borrowed.h"
#include "tests/support/thread_ranks.h"

namespace ds::pipeline {

struct TableImpl : torch::nn::Module {
  TableImpl(const std::string& name, at::ScalarType dtype) {
    weight = register_parameter("weight", torch::zeros({kVocabulary, kWidth}));
    fill_by_name(*this, name);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& tokens) { return torch::embedding(weight, tokens); }
  at::Tensor weight;
};
TORCH_MODULE(Table);

inline at::Tensor scores(TableImpl& table, const at::Tensor& x) { return torch::matmul(x, table.weight.t()); }

// The two halves of a layer: between them the activation is split over the tensor axis.
struct WideImpl : torch::nn::Module {
  WideImpl(const std::string& name, at::ScalarType dtype) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    wide = register_module("wide", torch::nn::Linear(kWidth, 2 * kWidth));
    fill_by_name(*this, name);
    to(dtype);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {x, torch::gelu(wide(norm(x)))}; }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear wide{nullptr};
};
TORCH_MODULE(Wide);

struct NarrowImpl : torch::nn::Module {
  NarrowImpl(const std::string& name, at::ScalarType dtype) {
    narrow = register_module("narrow", torch::nn::Linear(2 * kWidth, kWidth));
    fill_by_name(*this, name);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return x + narrow(y); }
  torch::nn::Linear narrow{nullptr};
};
TORCH_MODULE(Narrow);

inline std::vector<LayerSpec> halves_of(int depth, bool tied, at::ScalarType dtype) {
  std::vector<LayerSpec> layers;
  const std::string table = "embed";
  layers.push_back(tied ? LayerSpec::tied<Table>("embed", table, dtype)
                        : LayerSpec::of<Table>(table, dtype).named("embed"));
  for (int i = 0; i < depth; ++i) {
    const std::string name = "h." + std::to_string(i);
    layers.push_back(LayerSpec::of<Wide>(name, dtype).named(name + ".up"));
    layers.push_back(LayerSpec::of<Narrow>(name, dtype).named(name + ".down"));
  }
  layers.push_back(
      tied ? LayerSpec::tied_with<Table>("embed", scores, table, dtype)
           : LayerSpec::made_by([=] { return std::make_shared<TableImpl>("head", dtype); }, scores).named("head"));
  return layers;
}

// Tokens [2, 8].
inline MicroBatch text_of(int64_t micro_batch, int data_rank) {
  const at::Tensor steps = torch::arange(16) * 7 + 11 * micro_batch + 5 * data_rank;
  const at::Tensor tokens = (steps * steps + 3 * steps).remainder(kVocabulary).view({2, 8});
  return {.inputs = {tokens}, .labels = {(tokens * 5 + 2).remainder(kVocabulary)}};
}

constexpr int kBatchesOfAStep = 4;

struct SplitJob {
  int pipe = 2;
  int tensor = 2;
  int data = 1;
  int stage = 0;
  std::string schedule = "1f1b";
  bool tied = false;
  int interval = 0;  // of activation checkpoints
  bool sequence = false;
  at::ScalarType dtype = at::kFloat;
  int depth = 3;
  int steps = 5;
  bool cuts_vocabulary = true;  // its 13 entries are uneven over the ranks
  nlohmann::json more = nlohmann::json::object();
  decltype(engine::InitializeOptions::make_optimizer) make_optimizer;  // in place of the config's

  int world() const { return pipe * tensor * data; }
  nlohmann::json config() const {
    nlohmann::json result = {{"train_micro_batch_size_per_gpu", 2},
                             {"gradient_accumulation_steps", kBatchesOfAStep},
                             {"gradient_clipping", 0.5},
                             {"log_level", "error"},
                             {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 2e-3}, {"weight_decay", 0.01}}}}},
                             {"zero_optimization", {{"stage", stage}, {"stage3_param_persistence_threshold", 20}}},
                             {"tensor_parallel", {{"autotp_size", tensor}, {"sequence_parallel", sequence}}},
                             {"pipeline",
                              {{"stages", pipe},
                               {"schedule", schedule},
                               {"partition", "uniform"},
                               {"activation_checkpoint_interval", interval}}}};
    result.merge_patch(more);
    return result;
  }
  std::vector<parallel::SplitRule> rules() const {
    using enum parallel::Style;
    std::vector<parallel::SplitRule> result = {{".*up\\.wide", kColumn}, {".*down\\.narrow", kRow}};
    if (cuts_vocabulary) result.push_back({tied ? "embed" : "embed|head", kVocabulary});
    return result;
  }
  std::shared_ptr<PipelineModule> make() const {
    return std::make_shared<PipelineModule>(halves_of(depth, tied, dtype), PipelineOptions{.loss = cross_entropy});
  }
  std::shared_ptr<engine::Engine> start(comm::Communicator& world, const std::string& device = {}) const {
    return engine::initialize({.model = make(),
                               .config = config(),
                               .make_optimizer = make_optimizer,
                               .split = rules(),
                               .communicator = test::borrowed(world),
                               .device = device})
        .engine;
  }
};

// Plain torch in one process: every micro-batch of every data-parallel rank one after another.
inline Curve plain_curve(const SplitJob& job) {
  const auto module = job.make();
  module->build({});
  torch::optim::AdamW optimizer(module->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
  Curve curve;
  for (int64_t step = 0; step < job.steps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int64_t micro = step * kBatchesOfAStep; micro < (step + 1) * kBatchesOfAStep; ++micro) {
      for (int rank = 0; rank < job.data; ++rank) {
        const MicroBatch batch = text_of(micro, rank);
        const at::Tensor loss =
            cross_entropy(module->forward(batch.inputs[0]), batch.labels[0]) / (kBatchesOfAStep * job.data);
        loss.backward();
        sum += loss.item<double>();
      }
    }
    curve.losses.push_back(sum);
    curve.norms.push_back(torch::nn::utils::clip_grad_norm_(module->parameters(), 0.5));
    optimizer.step();
  }
  return curve;
}

using Body = std::function<void(engine::Engine& engine, comm::Communicator& world)>;

inline void run_split(const SplitJob& job, const Body& body) {
  test::run_ranks(job.world(), [&](comm::Communicator& world) {
    torch::set_num_threads(1);
    const auto engine = job.start(world);
    body(*engine, world);
  });
}

}  // namespace ds::pipeline
