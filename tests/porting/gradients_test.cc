// Gradients between backward() and step(), as LibTorch programs touch them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kLimit = 0.05;

nlohmann::ordered_json with_host_optimizer(nlohmann::ordered_json config) {
  config["zero_optimization"]["offload_optimizer"] = {{"device", "cpu"}};
  return config;
}

// What torch makes of the batches of `step` on all ranks: mean gradients.
State gradients_of(SmallNet& model, int step) {
  model->zero_grad();
  for (int rank = 0; rank < 2; ++rank) (model->loss(sample(step, rank)) / 2).backward();
  State gradients;
  for (const auto& item : model->named_parameters()) gradients[item.key()] = item.value().grad().clone();
  return gradients;
}

// Training with each step's gradient scaled to `limit`; the norms before.
std::vector<double> clip_plainly(PortedResult& result, double limit) {
  SmallNet model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<double> norms;
  for (int step = 0; step < 5; ++step) {
    gradients_of(model, step);
    norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), limit));
    optimizer.step();
  }
  result.weights = parameters_of(*model);
  return norms;
}

class Gradients : public ::testing::TestWithParam<int> {
 protected:
  nlohmann::ordered_json config() const { return small_config(GetParam(), 1); }
};

TEST_P(Gradients, TheEnginesClippingIsThatOfTorch) {
  PortedResult expected;
  const std::vector<double> norms = clip_plainly(expected, kLimit);
  std::vector<nlohmann::ordered_json> configs = {config()};
  if (GetParam() > 0) configs.push_back(with_host_optimizer(config()));
  for (const nlohmann::ordered_json& one : configs) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), one, communicator).engine;
      for (int step = 0; step < 5; ++step) {
        engine->backward(model->loss(sample(step, communicator.rank())));
        const double norm = engine->clip_grad_norm_(kLimit);
        EXPECT_NEAR(norm, norms[static_cast<size_t>(step)], 1e-6 * std::max(1.0, norm));
        engine->step();
        EXPECT_NEAR(engine->get_global_grad_norm().value(), norm, 1e-6 * std::max(1.0, norm));
      }
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.weights), 1e-5);
    });
  }
}

// Above stage 0 it throws where it reads, and the step after that is the one without it.
TEST_P(Gradients, TorchsClippingIsRightOrThrows) {
  PortedResult expected;
  const std::vector<double> norms = clip_plainly(expected, kLimit);
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    if (GetParam() == 0) {
      for (int step = 0; step < 5; ++step) {
        engine->backward(model->loss(sample(step, communicator.rank())));
        const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), kLimit);
        EXPECT_NEAR(norm, norms[static_cast<size_t>(step)], 1e-6 * std::max(1.0, norm));
        engine->step();
      }
      EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected.weights), 1e-5);
      return;
    }
    for (int step = 0; step < 5; ++step) {
      engine->backward(model->loss(sample(step, communicator.rank())));
      EXPECT_THAT([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), kLimit); },
                  ThrowsMessage<c10::Error>(AllOf(HasSubstr("gradient of parameter first.weight"),
                                                  HasSubstr("engine->clip_grad_norm_(max_norm)"))));
      engine->step();
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), TorchRun{.world = 2}.train_adamw()), 1e-5);
  });
}

TEST_P(Gradients, AreReadWholeAndSet) {
  for (const bool on_host : {false, true}) {
    if (on_host && GetParam() == 0) continue;
    SmallNet plain;
    const State expected = gradients_of(plain, 0);
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), on_host ? with_host_optimizer(config()) : config(), communicator).engine;
      engine->backward(model->loss(sample(0, communicator.rank())));
      State found;
      for (const auto& item : model->named_parameters()) found[item.key()] = engine->safe_get_full_grad(item.value());
      EXPECT_LT(largest_difference(found, expected), 1e-6);
      // Local parts of all ranks are the whole.
      for (const auto& item : model->named_parameters()) {
        const double sum = mean_over(communicator, engine->safe_get_local_grad(item.value()).sum().item<double>());
        const double whole = found.at(item.key()).sum().item<double>();
        EXPECT_NEAR(sum * (GetParam() == 0 ? 1 : 2), whole, 1e-5);
      }
      engine->safe_set_full_grad(model->last->bias, torch::full({3}, 0.5));
      EXPECT_TRUE(engine->safe_get_full_grad(model->last->bias).equal(torch::full({3}, 0.5)));
      double squares = 3 * 0.25;
      for (const auto& [name, gradient] : expected) {
        if (name != "last.bias") squares += gradient.pow(2).sum().item<double>();
      }
      engine->step();
      EXPECT_NEAR(engine->get_global_grad_norm().value(), std::sqrt(squares), 1e-5);
      EXPECT_THAT([&] { engine->safe_get_full_grad(model->last->bias); },
                  ThrowsMessage<UsageError>(HasSubstr("before backward()")));
    });
  }
}

TEST_P(Gradients, ThatAreTakenAwayOrReplacedAreAnErrorBeforeAnythingIsApplied) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config(), communicator).engine;
    const auto backward = [&] { engine->backward(model->loss(sample(0, communicator.rank()))); };
    backward();
    model->zero_grad();
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("first.weight was taken away"), HasSubstr("zero_grad()"))));
    engine->zero_grad();
    backward();
    model->norm->bias.mutable_grad() = torch::zeros({11});
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("norm.bias was replaced")));
    engine->zero_grad();
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), parameters_of(*SmallNet())), 0.0);
    EXPECT_EQ(engine->global_steps(), 0);
    EXPECT_LT(largest_difference(train(*engine, model, 3), TorchRun{.world = 2, .steps = 3}.train_adamw()), 2e-6);
  });
}

TEST_P(Gradients, InsideAnAccumulationAreNotOffered) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 2), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    EXPECT_THAT([&] { engine->safe_get_full_grad(model->last->bias); },
                ThrowsMessage<UsageError>(HasSubstr("micro-batch 1 of 2")));
    EXPECT_THAT([&] { engine->clip_grad_norm_(1.0); }, ThrowsMessage<UsageError>(HasSubstr("micro-batch 1 of 2")));
  });
}

TEST_P(Gradients, MastersAndOptimizerStatesAreReadAndSet) {
  for (const bool bf16 : {false, true}) {
    for (const bool on_host : {false, true}) {
      if (on_host && GetParam() == 0) continue;
      nlohmann::ordered_json one = on_host ? with_host_optimizer(config()) : config();
      if (bf16) one = with_bf16(one);
      test::run_ranks(2, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto engine = start(model.ptr(), one, communicator).engine;
        const State masters = train(*engine, model, 2);
        const at::Tensor& weight = model->first->weight;
        EXPECT_TRUE(engine->safe_get_full_fp32_param(weight).equal(masters.at("first.weight")));
        const at::Tensor moment = engine->safe_get_full_optimizer_state(weight, "exp_avg");
        EXPECT_EQ(moment.sizes(), weight.sizes());
        EXPECT_GT(moment.abs().max().item<double>(), 0.0);
        EXPECT_THAT([&] { engine->safe_get_full_optimizer_state(weight, "exp_average"); },
                    ThrowsMessage<UsageError>(AllOf(HasSubstr("exp_avg, exp_avg_sq"), HasSubstr("\"exp_average\""))));
        engine->safe_set_full_optimizer_state(weight, moment * 2, "exp_avg");
        EXPECT_TRUE(engine->safe_get_full_optimizer_state(weight, "exp_avg").equal(moment * 2));
        const at::Tensor value = masters.at("first.weight") * 0.5 + 0.001;
        engine->safe_set_full_fp32_param(weight, value);
        EXPECT_TRUE(engine->safe_get_full_fp32_param(weight).equal(value));
        const State weights = copy_of(engine->module_state_dict());
        EXPECT_TRUE(weights.at("first.weight").equal(value.to(weights.at("first.weight").scalar_type())));
        EXPECT_TRUE(
            weights.at("last.weight").equal(masters.at("last.weight").to(weights.at("last.weight").scalar_type())));
        const at::Tensor local = engine->safe_get_local_fp32_param(weight);
        engine->safe_set_local_fp32_param(weight, local + 1.0);
        EXPECT_TRUE(engine->safe_get_full_fp32_param(weight).equal(value + 1.0));
        const at::Tensor part = engine->safe_get_local_optimizer_state(weight, "exp_avg_sq");
        engine->safe_set_local_optimizer_state(weight, torch::ones_like(part), "exp_avg_sq");
        EXPECT_TRUE(engine->safe_get_full_optimizer_state(weight, "exp_avg_sq").equal(torch::ones({11, 6})));
        EXPECT_THAT(
            [&] {
              engine->safe_set_full_fp32_param(weight, torch::ones({6, 11}));
            },
            ThrowsMessage<UsageError>(AllOf(HasSubstr("[11, 6]"), HasSubstr("[6, 11]"))));
        train(*engine, model, 1);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Gradients, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
