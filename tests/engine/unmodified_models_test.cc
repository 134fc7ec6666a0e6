// Stage 3 around models that nobody prepared for it: no wrapper, no hook, no list of leaf modules.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

constexpr double kModelTolerance = 2e-5;
constexpr int kModelSteps = 4;

// A module whose loss() is all that training knows of it.
struct Model : torch::nn::Module {
  virtual std::vector<at::Tensor> losses(const at::Tensor& x, int64_t step) = 0;
};

using MakeModel = std::function<std::shared_ptr<Model>()>;

// Values that do not depend on generators.
template <class M>
std::shared_ptr<Model> filled() {
  auto model = std::make_shared<M>();
  fill(*model);
  return model;
}

State with_torch(const MakeModel& make, int world) {
  const std::shared_ptr<Model> model = make();
  std::vector<at::Tensor> parameters;  // a shared one once: torch's list has it for every path
  for (const at::Tensor& parameter : model->parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(parameters.begin(), parameters.end(), same)) parameters.push_back(parameter);
  }
  torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int64_t step = 0; step < kModelSteps; ++step) {
    adamw.zero_grad();
    for (int rank = 0; rank < world; ++rank) {
      for (const at::Tensor& loss : model->losses(sample(step, rank), step))
        (loss / world).backward({}, /*retain_graph=*/true);
    }
    // The engine updates parameters that no rank used with a gradient of zero.
    for (at::Tensor& parameter : parameters) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
    }
    adamw.step();
  }
  return parameters_of(*model);
}

void expect_torch_at_stage_3(const MakeModel& make) {
  const State expected = with_torch(make, 2);
  for (const int64_t reuse : {int64_t{0}, int64_t{100}, int64_t{1000000}}) {
    ordered_json config = small_config(3, 1);
    config["zero_optimization"]["stage3_max_reuse_distance"] = reuse;
    config["zero_optimization"]["stage3_max_live_parameters"] = 300;
    run_ranks(2, [&](comm::Communicator& communicator) {
      const std::shared_ptr<Model> model = make();
      const auto engine = start(model, config, communicator).engine;
      for (int64_t step = 0; step < kModelSteps; ++step) {
        for (const at::Tensor& loss : model->losses(sample(step, communicator.rank()), step)) {
          engine->backward(loss, /*retain_graph=*/true);
        }
        engine->step();
      }
      State found;
      for (const auto& [name, tensor] : engine->module_state_dict()) {
        if (expected.contains(name)) found.emplace(name, tensor);  // no buffers
      }
      EXPECT_LT(largest_difference(found, expected), kModelTolerance) << "reuse " << reuse;
    });
  }
}

struct SharedSubmodule : Model {
  SharedSubmodule() {
    inner = register_module("inner", torch::nn::Linear(6, 6));
    outer = register_module("outer", torch::nn::Sequential(inner, torch::nn::Tanh(), inner));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t) override {
    return {(outer->forward(x) + inner(x)).pow(2).mean()};
  }
  torch::nn::Linear inner{nullptr};
  torch::nn::Sequential outer{nullptr};
};

struct Recurrent : Model {
  Recurrent() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2)));
    gru = register_module("gru", torch::nn::GRU(5, 4));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t) override {
    const at::Tensor sequence = std::get<0>(lstm->forward(x.unsqueeze(1)));
    return {std::get<0>(gru->forward(sequence)).pow(2).mean()};
  }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::GRU gru{nullptr};
};

// The layers a step uses follow from its number: the same on all ranks, another order every time.
struct ChosenByData : Model {
  ChosenByData() {
    experts = register_module("experts", torch::nn::ModuleList());
    for (int i = 0; i < 4; ++i) experts->push_back(torch::nn::Linear(6, 6));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t step) override {
    const auto expert = [&](int64_t i) { return experts->ptr<torch::nn::LinearImpl>(static_cast<size_t>(i % 4)); };
    return {expert(3 * step + 1)->forward(torch::tanh(expert(step)->forward(x))).pow(2).mean()};
  }
  torch::nn::ModuleList experts{nullptr};
};

struct Convolutional : Model {
  Convolutional() {
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(1, 4, 3).padding(1).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    last = register_module("last", torch::nn::Linear(24, 2));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t) override {
    return {last(torch::relu(norm(conv(x.unsqueeze(1)))).flatten(1)).pow(2).mean()};
  }
  torch::nn::Conv1d conv{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};

struct TwoLosses : Model {
  TwoLosses() {
    trunk = register_module("trunk", torch::nn::Linear(6, 6));
    left = register_module("left", torch::nn::Linear(6, 3));
    right = register_module("right", torch::nn::Linear(6, 2));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t) override {
    const at::Tensor hidden = torch::tanh(trunk(x));
    return {left(hidden).pow(2).mean(), right(hidden).abs().mean()};
  }
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
};

// A parameter of one module, used by another; and embeddings, whose gradients autograd makes differently.
struct OutsideItsModule : Model {
  OutsideItsModule() {
    table = register_module("table", torch::nn::Embedding(7, 6));
    scale = register_parameter("scale", torch::ones({6}));
    layer = register_module("layer", torch::nn::Linear(6, 6));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t) override {
    const at::Tensor index = (x.select(1, 0).abs() * 6).to(torch::kLong);
    const at::Tensor hidden = table(index) * scale + layer->weight.t().matmul(layer->bias);
    return {torch::linear(hidden, table->weight).pow(2).mean()};
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear layer{nullptr};
  at::Tensor scale;
};

// The last layers' weights get a gradient on some ranks only, though all read them.
struct DetachedByData : Model {
  DetachedByData() {
    for (int64_t i = 0; i < 8; ++i) layers.push_back(register_parameter(cat("layer", i), torch::ones({6, 6})));
  }
  std::vector<at::Tensor> losses(const at::Tensor& x, int64_t) override {
    const bool detached = x[0][0].item<double>() < 0.3;
    at::Tensor hidden = x;
    for (size_t i = 0; i < layers.size(); ++i) {
      hidden = torch::tanh(torch::linear(hidden, i >= 6 && detached ? layers[i].detach() : layers[i]));
    }
    return {hidden.pow(2).mean()};
  }
  std::vector<at::Tensor> layers;
};

TEST(UnmodifiedModels, AGradientOnSomeRanksOnly) { expect_torch_at_stage_3(filled<DetachedByData>); }
TEST(UnmodifiedModels, SharedSubmodules) { expect_torch_at_stage_3(filled<SharedSubmodule>); }
TEST(UnmodifiedModels, RecurrentNetworks) { expect_torch_at_stage_3(filled<Recurrent>); }
TEST(UnmodifiedModels, ModulesChosenByData) { expect_torch_at_stage_3(filled<ChosenByData>); }
TEST(UnmodifiedModels, ConvolutionsAndBatchNorm) { expect_torch_at_stage_3(filled<Convolutional>); }
TEST(UnmodifiedModels, TwoLosses) { expect_torch_at_stage_3(filled<TwoLosses>); }
TEST(UnmodifiedModels, ParametersUsedOutsideTheirModule) { expect_torch_at_stage_3(filled<OutsideItsModule>); }

TEST(UnmodifiedModels, ModuleStateDictIsWholeAndLeavesNothingGathered) {
  const State expected = parameters_of(*filled<TwoLosses>());
  run_ranks(3, [&](comm::Communicator& communicator) {
    const std::shared_ptr<Model> model = filled<TwoLosses>();
    const auto engine = start(model, small_config(3, 1), communicator).engine;
    const int64_t between_steps = engine->model_state_bytes().parameters;
    EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), expected), 0.0);
    EXPECT_EQ(engine->model_state_bytes().parameters, between_steps);
    EXPECT_EQ(between_steps, engine->plan().bytes->parameters);
  });
}

}  // namespace
}  // namespace ds::engine
