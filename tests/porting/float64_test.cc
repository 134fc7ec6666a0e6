// Models of float64, as programs of physics have them: every stage, every optimizer, to the last digits of plain torch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/porting/float64_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

struct Rule {
  const char* name;
  ordered_json section;
  MakeOptimizer in_torch;
};

std::vector<Rule> rules() {
  using namespace torch::optim;
  return {
      {"AdamW",
       {{"type", "AdamW"}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}}}},
       [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions(0.02).weight_decay(0.1)); }},
      {"Adam",
       {{"type", "Adam"}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}, {"adam_w_mode", false}, {"amsgrad", true}}}},
       [](auto p) { return std::make_unique<Adam>(p, AdamOptions(0.02).weight_decay(0.1).amsgrad(true)); }},
      {"SGD",
       {{"type", "SGD"}, {"params", {{"lr", 0.05}, {"momentum", 0.9}, {"weight_decay", 0.01}}}},
       [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.05).momentum(0.9).weight_decay(0.01)); }},
      {"Adagrad",
       {{"type", "Adagrad"}, {"params", {{"lr", 0.05}, {"weight_decay", 0.01}, {"eps", 1e-10}}}},
       [](auto p) { return std::make_unique<Adagrad>(p, AdagradOptions(0.05).weight_decay(0.01)); }},
  };
}

class Float64 : public ::testing::TestWithParam<int> {
 protected:
  ordered_json config(int accumulation = 1) const {
    ordered_json config = small_config(GetParam(), accumulation);
    config["zero_allow_untested_optimizer"] = true;
    return config;
  }
};

// With two micro-batches a step, and a limit on the norm that is met in every step.
TEST_P(Float64, TrainsAsPlainTorchDoesToTheLastDigits) {
  for (const Rule& rule : rules()) {
    SCOPED_TRACE(rule.name);
    for (const int world : {1, 2}) {
      for (const double limit : {0.0, 0.3}) {
        ordered_json config = this->config(2);
        config["optimizer"] = rule.section;
        config["gradient_clipping"] = limit;
        SmallNet in_torch = double_net();
        const auto optimizer = rule.in_torch(in_torch->parameters());
        const TorchRun plain = {.world = world, .accumulation = 2, .steps = 6};
        const PortedResult expected = run_plainly(plain, in_torch, *optimizer, limit);
        test::run_ranks(world, [&](comm::Communicator& communicator) {
          SmallNet model = double_net();
          const auto engine = start(model.ptr(), config, communicator).engine;
          EXPECT_EQ(engine->plan().model_dtype, DType::kFloat64);
          expect_same(train_double(*engine, model, communicator, 6), expected, kSameDouble);
          EXPECT_EQ(model->first->weight.scalar_type(), at::kDouble);
        });
      }
    }
  }
}

// u'' + u = f on a line, by a network: derivatives of derivatives.
at::Tensor physics_loss(torch::nn::Sequential& net, int step, int rank) {
  const at::Tensor x =
      (torch::linspace(0.0, 2.0, 16, torch::kDouble) + (0.013 * step + 0.07 * rank)).view({16, 1}).requires_grad_(true);
  const at::Tensor u = net->forward(x);
  const auto derivative = [&](const at::Tensor& of) {
    return torch::autograd::grad({of.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  };
  const at::Tensor residual = derivative(derivative(u)) + u - torch::sin(3.0 * x);
  return residual.pow(2).mean() + net->forward(torch::zeros({1, 1}, torch::kDouble)).pow(2).mean();
}

torch::nn::Sequential physics_net() {
  torch::nn::Sequential net(torch::nn::Linear(1, 12), torch::nn::Tanh(), torch::nn::Linear(12, 12), torch::nn::Tanh(),
                            torch::nn::Linear(12, 1));
  net->to(torch::kDouble);
  fill(*net);
  return net;
}

TEST_P(Float64, AnEquationWithSecondDerivativesIsLearntAsByPlainTorch) {
  constexpr int kSteps = 10;
  for (const int world : {1, 2}) {
    torch::nn::Sequential net = physics_net();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    std::vector<double> expected;
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      double loss = 0;
      for (int rank = 0; rank < world; ++rank) {
        const at::Tensor part = physics_loss(net, step, rank) / world;
        part.backward();
        loss += part.item<double>();
      }
      optimizer.step();
      expected.push_back(loss);
    }
    test::run_ranks(world, [&](comm::Communicator& communicator) {
      torch::nn::Sequential own = physics_net();
      const auto engine = start(own.ptr(), config(), communicator).engine;
      for (int step = 0; step < kSteps; ++step) {
        const at::Tensor loss = physics_loss(own, step, communicator.rank());
        engine->backward(loss);
        engine->step();
        const double mean = mean_over(communicator, loss.item<double>());
        EXPECT_NEAR(mean, expected[static_cast<size_t>(step)], kSameDouble * expected[static_cast<size_t>(step)]);
      }
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*net)), kSameDouble);
    });
  }
}

TEST_P(Float64, WhatIsReadOfAParameterHasAllItsDigits) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model = double_net();
    const State before = parameters_of(*model);
    const auto engine = start(model.ptr(), config(), communicator).engine;
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
    EXPECT_EQ(largest_difference(copy_of(engine->module_state_dict()), before), 0.0);
    const at::Tensor& weight = model->first->weight;
    const at::Tensor master = engine->safe_get_full_fp32_param(weight);
    EXPECT_TRUE(master.equal(before.at("first.weight")));
    engine->safe_set_full_fp32_param(weight, master * (1 + 1e-12));
    EXPECT_TRUE(engine->safe_get_full_fp32_param(weight).equal(master * (1 + 1e-12)));
    engine->backward(model->loss(sample(0, communicator.rank())));
    EXPECT_EQ(engine->safe_get_full_grad(weight).scalar_type(), at::kDouble);
    engine->step();
    EXPECT_EQ(engine->safe_get_full_optimizer_state(weight, "exp_avg").scalar_type(), at::kDouble);
    EXPECT_EQ(engine->safe_get_local_optimizer_state(weight, "exp_avg_sq").scalar_type(), at::kDouble);
    train_double(*engine, model, communicator, 2, 1);
    const Engine::ModelStateBytes held = engine->model_state_bytes();
    const auto predicted = engine->plan().bytes.value();
    EXPECT_EQ(held.parameters, predicted.parameters);
    // At stage 3 the small buckets of this test cut modules, whose gradients may then meet.
    if (GetParam() < 3) EXPECT_EQ(held.gradients, predicted.gradients);
    EXPECT_EQ(held.master, 0);
    EXPECT_EQ(held.optimizer, predicted.optimizer);
  });
}

// Written by two ranks at one stage, read by one and by two at the others: the run goes on with the same bits or, on
// another number of ranks, with the same digits.
TEST_P(Float64, CheckpointsHaveAllDigits) {
  const test::ScratchFolder folder;
  PortedResult through;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model = double_net();
    const auto engine = start(model.ptr(), config(), communicator).engine;
    train_double(*engine, model, communicator, 3);
    engine->save_checkpoint(folder.path().string(), "three");
    const PortedResult own = train_double(*engine, model, communicator, 3, 3);
    if (communicator.rank() == 0) through = own;
  });
  for (const int stage : {0, 1, 2, 3}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model = double_net();
      const auto engine = start(model.ptr(), small_config(stage, 1), communicator).engine;
      EXPECT_TRUE(engine->load_checkpoint(folder.path().string(), "three"));
      expect_same(train_double(*engine, model, communicator, 3, 3), through, kSameDouble);
    });
  }
  test::run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model = double_net();
    ordered_json config = this->config(2);
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_TRUE(engine->load_checkpoint(folder.path().string(), "three"));
    for (int step = 3; step < 6; ++step) {
      for (const int rank : {0, 1}) {  // of the two that saved
        engine->backward(model->loss(sample(step, rank)));
        engine->step();
      }
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), through.weights), kSameDouble * 10);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Float64, ::testing::Values(0, 1, 2, 3), stage_name);

ordered_json offloading(int stage, const ordered_json& optimizer, const ordered_json& parameters = {}) {
  ordered_json config = small_config(stage, 1);
  config["gradient_clipping"] = 0.3;
  config["zero_optimization"]["offload_optimizer"] = optimizer;
  if (!parameters.is_null()) config["zero_optimization"]["offload_param"] = parameters;
  return config;
}

TEST(Float64Offload, StatesInHostMemoryAndInFilesHaveAllDigits) {
  const test::ScratchFolder folder;
  const std::string disk = folder.path().string();
  const std::vector<ordered_json> configs = {
      offloading(1, {{"device", "cpu"}}),
      offloading(2, {{"device", "cpu"}}),
      offloading(2, {{"device", "cpu"}, {"super_offload", true}}),
      offloading(2, {{"device", "nvme"}, {"nvme_path", disk}}),
      offloading(3, {{"device", "cpu"}}, {{"device", "cpu"}}),
      offloading(3, {{"device", "nvme"}, {"nvme_path", disk}}, {{"device", "nvme"}, {"nvme_path", disk}}),
  };
  for (const int world : {1, 2}) {
    SmallNet plain = double_net();
    torch::optim::AdamW optimizer(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    const PortedResult expected = run_plainly({.world = world, .steps = 5}, plain, optimizer, 0.3);
    for (const ordered_json& config : configs) {
      SCOPED_TRACE(config["zero_optimization"].dump());
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        SmallNet model = double_net();
        const auto engine = start(model.ptr(), config, communicator).engine;
        expect_same(train_double(*engine, model, communicator, 5), expected, kSameDouble);
        EXPECT_EQ(engine->offloaded_state_bytes().host_total(), engine->plan().offloaded_bytes.host_total());
      });
    }
  }
}

// Optimizers that torch's C++ library lacks, by their formulas.
TEST(Float64Optimizers, LionIsItsFormula) {
  constexpr double kLr = 0.01;
  const auto lion = [&](SmallNet& model, std::vector<at::Tensor>& averages) {
    const torch::NoGradGuard no_grad;
    const std::vector<at::Tensor> parameters = model->parameters();
    averages.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor gradient = parameters[i].grad();
      if (!averages[i].defined()) averages[i] = torch::zeros_like(gradient);
      parameters[i].mul_(1 - kLr * 0.1);
      parameters[i].sub_((averages[i] * 0.9 + gradient * 0.1).sign() * kLr);
      averages[i].mul_(0.99).add_(gradient * (1 - 0.99));
    }
  };
  SmallNet model = double_net();
  std::vector<at::Tensor> averages;
  for (int step = 0; step < 6; ++step) {
    model->zero_grad();
    for (const int rank : {0, 1}) (model->loss(sample(step, rank)) / 2).backward();
    lion(model, averages);
  }
  for (const int stage : {0, 3}) {
    ordered_json config = small_config(stage, 1);
    config["optimizer"] = {{"type", "Lion"}, {"params", {{"lr", kLr}, {"weight_decay", 0.1}, {"betas", {0.9, 0.99}}}}};
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet own = double_net();
      const auto engine = start(own.ptr(), config, communicator).engine;
      EXPECT_LT(largest_difference(train_double(*engine, own, communicator, 6).weights, parameters_of(*model)),
                kSameDouble);
    });
  }
}

// Whole-tensor norms and matrices: with slices on two ranks as on one, and with more digits than float32 has.
TEST(Float64Optimizers, LambAndMuonAreTheSameOnSlices) {
  for (const char* type : {"Lamb", "Muon"}) {
    SCOPED_TRACE(type);
    const auto run = [&](int stage, int accumulation, int world, bool is_double) {
      ordered_json config = small_config(stage, accumulation);
      config["zero_allow_untested_optimizer"] = true;
      config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.02}, {"weight_decay", 0.1}}}};
      State weights;
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        SmallNet model = is_double ? double_net() : SmallNet();
        const auto engine = start(model.ptr(), config, communicator).engine;
        for (int step = 0; step < 5; ++step) {
          for (int micro = 0; micro < accumulation; ++micro) {
            engine->backward(model->loss(sample(step, world > 1 ? communicator.rank() : micro)));
            engine->step();
          }
        }
        const State own = copy_of(engine->fp32_state_dict());
        if (communicator.rank() == 0) weights = own;
      });
      return weights;
    };
    const State alone = run(0, 2, 1, true);
    EXPECT_LT(largest_difference(run(0, 1, 2, true), alone), kSameDouble);
    EXPECT_LT(largest_difference(run(2, 1, 2, true), alone), kSameDouble);
    const double rounding = largest_difference(run(0, 2, 1, false), alone);
    EXPECT_LT(rounding, 1e-3);
    EXPECT_GT(rounding, 1e-10);
  }
}

}  // namespace
}  // namespace ds::engine
