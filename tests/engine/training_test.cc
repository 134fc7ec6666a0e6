// The engine against plain torch on the same global batches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

constexpr double kFloat32Tolerance = 2e-6;

// Trains on `world` ranks and expects the weights of every rank to be `expected`.
void expect_weights(int world, const ordered_json& config, int steps, const State& expected,
                    double tolerance = kFloat32Tolerance) {
  run_ranks(world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const Initialized parts = start(model.ptr(), config, communicator);
    EXPECT_LT(largest_difference(train(*parts.engine, model, steps), expected), tolerance)
        << "rank " << communicator.rank() << ", " << config.dump();
    parts.engine->synchronize_parameters();
    if (parts.engine->plan().model_dtype == config::DType::kFloat32) {
      EXPECT_LT(largest_difference(parameters_of(*model), expected), tolerance);
    }
  });
}

struct Case {
  int stage;
  int world;
  int accumulation;
};

class StagesTest : public ::testing::TestWithParam<Case> {};

TEST_P(StagesTest, AdamWAgreesWithTorch) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{.world = world, .accumulation = accumulation, .steps = 6}.train_adamw();
  expect_weights(world, small_config(stage, accumulation), 6, expected);
}

TEST_P(StagesTest, ClippingByTheGlobalNormAgreesWithTorch) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected =
      TorchRun{.world = world, .accumulation = accumulation, .steps = 4, .clip_norm = 0.3}.train_adamw();
  ordered_json config = small_config(stage, accumulation);
  config["gradient_clipping"] = 0.3;
  expect_weights(world, config, 4, expected);
}

TEST_P(StagesTest, ClippingByValueAgreesWithTorch) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{
      .world = world, .accumulation = accumulation, .steps = 4, .change_gradients = [](torch::nn::Module& model) {
        torch::nn::utils::clip_grad_value_(model.parameters(), 0.05);
      }}.train_adamw();
  ordered_json config = small_config(stage, accumulation);
  config["gradient_clip_by_value"] = 0.05;
  expect_weights(world, config, 4, expected);
}

TEST_P(StagesTest, EveryWayToAverageGivesTheSameMean) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{.world = world, .accumulation = accumulation, .steps = 3}.train_adamw();
  ordered_json config = small_config(stage, accumulation);
  config["prescale_gradients"] = true;
  expect_weights(world, config, 3, expected);
  config["prescale_gradients"] = false;
  config["gradient_predivide_factor"] = 2.5;
  expect_weights(world, config, 3, expected);
}

TEST_P(StagesTest, SumIsTheMeanTimesTheRanks) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{
      .world = world, .accumulation = accumulation, .steps = 3, .change_gradients = [&](torch::nn::Module& model) {
        for (at::Tensor& p : model.parameters()) p.mutable_grad().mul_(GetParam().world);
      }}.train_adamw();
  ordered_json config = small_config(stage, accumulation);
  config["gradient_allreduce_op"] = "sum";
  if (stage == 3) {  // as in DeepSpeed
    EXPECT_THROW(config::parse(config, {.dp_world_size = world, .auto_values = {}}), ConfigError);
    return;
  }
  expect_weights(world, config, 3, expected);
}

TEST_P(StagesTest, NoSyncAddsToTheGradientThatIsReducedLater) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{.world = world, .accumulation = 3, .steps = 3}.train_adamw();
  ordered_json config = small_config(stage, 3);
  config["managed_gradient_accumulation"] = false;
  run_ranks(world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    for (int64_t micro = 0; micro < 9; ++micro) {
      const at::Tensor loss = model->loss(sample(micro, communicator.rank()));
      if (micro % 3 != 2) {
        const auto guard = engine->no_sync();
        const int64_t before = communicator.counters().total_bytes_sent();
        engine->backward(loss);
        EXPECT_EQ(communicator.counters().total_bytes_sent(), before);
      } else {
        engine->backward(loss);
        engine->step();
      }
    }
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), kFloat32Tolerance);
  });
}

TEST_P(StagesTest, SeveralBackwardsOfOneStepAddUp) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{.world = world, .accumulation = 2, .steps = 3}.train_adamw();
  run_ranks(world, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam().stage, 1), communicator).engine;
    for (int64_t step = 0; step < 3; ++step) {
      for (int64_t micro = 2 * step; micro < 2 * step + 2; ++micro) {
        engine->backward(model->loss(sample(micro, communicator.rank())) / 2);
      }
      engine->step();
    }
    EXPECT_EQ(engine->global_steps(), 3);
    EXPECT_LT(largest_difference(copy_of(engine->fp32_state_dict()), expected), kFloat32Tolerance);
  });
}

TEST_P(StagesTest, Bfloat16StaysNearFloat32) {
  const auto [stage, world, accumulation] = GetParam();
  const State expected = TorchRun{.world = world, .accumulation = accumulation, .steps = 5}.train_adamw(2e-3);
  ordered_json config = small_config(stage, accumulation);
  config["optimizer"]["params"]["lr"] = 2e-3;
  config["bf16"]["enabled"] = true;
  // Adam's first updates have the size of the rate whatever the gradient: a sign that rounding turns costs 2 lr a step.
  expect_weights(world, config, 5, expected, 2 * 5 * 2e-3);
  config["data_types"]["grad_accum_dtype"] = "fp32";
  config["communication_data_type"] = "fp32";
  expect_weights(world, config, 5, expected, 2 * 5 * 2e-3);
}

TEST_P(StagesTest, PredictedBytesAreTheMeasuredOnes) {
  const auto [stage, world, accumulation] = GetParam();
  for (const char* precision : {"", "bf16", "fp16"}) {
    ordered_json config = small_config(stage, accumulation);
    config["zero_optimization"]["reduce_bucket_size"] = 60;  // several buckets
    if (*precision != '\0') config[precision]["enabled"] = true;
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      train(*engine, model, 3);
      const Engine::ModelStateBytes measured = engine->model_state_bytes();
      const zero::ModelStateBytes predicted = engine->plan().bytes.value();
      EXPECT_EQ(measured.parameters, predicted.parameters);
      EXPECT_EQ(measured.gradients, predicted.gradients) << config.dump() << " world " << communicator.size();
      EXPECT_EQ(measured.master, predicted.master);
      EXPECT_LE(measured.gathered, engine->plan().step_bytes.gathered);
      EXPECT_EQ(measured.gathered > 0, stage == 3 && world > 1);
      EXPECT_EQ(measured.optimizer, predicted.optimizer);
    });
  }
}

TEST_P(StagesTest, PredictedOptimizerStatesAreTheMeasuredOnes) {
  const auto [stage, world, accumulation] = GetParam();
  for (const char* type : {"Adam", "AdamW", "Lamb", "Adagrad", "Lion", "Muon", "SGD"}) {
    ordered_json config = small_config(stage, accumulation);
    config["zero_allow_untested_optimizer"] = true;
    config["optimizer"] = {{"type", type}, {"params", {{"lr", 0.01}}}};
    if (type == std::string("SGD")) config["optimizer"]["params"]["momentum"] = 0.9;
    run_ranks(world, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      train(*engine, model, 1);
      EXPECT_GT(engine->model_state_bytes().optimizer, 0) << type;
      EXPECT_EQ(engine->model_state_bytes().optimizer, engine->plan().bytes->optimizer) << type;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, StagesTest,
                         ::testing::Values(Case{0, 1, 1}, Case{0, 2, 2}, Case{0, 3, 1}, Case{1, 1, 2}, Case{1, 2, 1},
                                           Case{1, 3, 2}, Case{2, 1, 1}, Case{2, 2, 2}, Case{2, 3, 1}, Case{3, 1, 1},
                                           Case{3, 2, 2}, Case{3, 3, 1}, Case{3, 2, 1}),
                         [](const auto& variant) {
                           return cat("Stage", variant.param.stage, "Ranks", variant.param.world, "Gas",
                                      variant.param.accumulation);
                         });

TEST(Training, AClientOptimizerStandsInForTheConfigs) {
  const State expected = [] {
    SmallNet model;
    torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    return TorchRun{.world = 2, .steps = 4}.train(model, sgd);
  }();
  ordered_json config = small_config(0, 1);
  config.erase("optimizer");
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto sgd =
        std::make_shared<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const Initialized parts =
        initialize({.model = model.ptr(), .config = config, .optimizer = sgd, .communicator = borrowed(communicator)});
    EXPECT_EQ(parts.optimizer, nullptr);
    EXPECT_THAT(parts.engine->get_lr(), ::testing::ElementsAre(0.05));
    EXPECT_LT(largest_difference(train(*parts.engine, model, 4), expected), kFloat32Tolerance);
  });
}

TEST(Training, ParameterGroupsHaveTheirOwnRateAndDecay) {
  const State expected = [] {
    SmallNet model;
    std::vector<at::Tensor> biases, weights;
    for (const auto& item : model->named_parameters()) {
      (item.key().ends_with("bias") ? biases : weights).push_back(item.value());
    }
    torch::optim::AdamW adamw({torch::optim::OptimizerParamGroup(weights)},
                              torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    adamw.add_param_group(torch::optim::OptimizerParamGroup(
        biases, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.005).weight_decay(0.0))));
    return TorchRun{.world = 2, .steps = 4}.train(model, adamw);
  }();
  for (const int stage : {0, 1, 2, 3}) {
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = initialize({.model = model.ptr(),
                                      .config = small_config(stage, 1),
                                      .parameter_groups = {{.parameters = {"*bias"}, .lr = 0.005, .weight_decay = 0.0}},
                                      .communicator = borrowed(communicator)})
                              .engine;
      EXPECT_THAT(engine->get_lr(), ::testing::ElementsAre(0.02, 0.005));
      EXPECT_LT(largest_difference(train(*engine, model, 4), expected), kFloat32Tolerance) << "stage " << stage;
    });
  }
}

TEST(Training, AParameterGroupsPatternHasStarsAtAnyPlace) {
  run_ranks(2, [](comm::Communicator& communicator) {
    for (const char* pattern : {"*bia*", "*.b*as", "*i*s"}) {
      SmallNet model;
      SmallNet same;
      const auto run = [&](SmallNet& net, const std::string& biases) {
        const auto engine = initialize({.model = net.ptr(),
                                        .config = small_config(1, 1),
                                        .parameter_groups = {{.parameters = {biases}, .lr = 0.005}},
                                        .communicator = borrowed(communicator)})
                                .engine;
        return train(*engine, net, 2);
      };
      EXPECT_EQ(largest_difference(run(model, pattern), run(same, "*bias")), 0) << pattern;
    }
  });
}

// Frozen, unused and tied parameters in one module.
struct OddNetImpl : torch::nn::Module {
  OddNetImpl() {
    frozen = register_module("frozen", torch::nn::Linear(6, 6));
    tied = register_module("tied", torch::nn::Linear(6, 6));
    unused = register_module("unused", torch::nn::Linear(6, 5));
    also_tied = register_parameter("also_tied", tied->weight);
    fill(*this);
    for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor loss(const at::Tensor& x) { return torch::linear(torch::tanh(tied(frozen(x))), also_tied).pow(2).mean(); }
  torch::nn::Linear frozen{nullptr}, tied{nullptr}, unused{nullptr};
  at::Tensor also_tied;
};
TORCH_MODULE(OddNet);

TEST(Training, FrozenUnusedAndTiedParametersNeedNoDeclaration) {
  const State expected = [] {
    OddNet model;
    torch::optim::AdamW adamw({model->tied->weight, model->tied->bias, model->unused->weight, model->unused->bias},
                              torch::optim::AdamWOptions(0.02).weight_decay(0.0));
    for (int64_t step = 0; step < 4; ++step) {
      adamw.zero_grad();
      for (int rank = 0; rank < 2; ++rank) (model->loss(sample(step, rank)) / 2).backward();
      adamw.step();
    }
    return parameters_of(*model);
  }();
  for (const int stage : {0, 1, 2, 3}) {
    ordered_json config = small_config(stage, 1);
    config["optimizer"]["params"]["weight_decay"] = 0.0;
    run_ranks(2, [&](comm::Communicator& communicator) {
      OddNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      for (int64_t step = 0; step < 4; ++step) {
        engine->backward(model->loss(sample(step, communicator.rank())));
        engine->step();
      }
      engine->synchronize_parameters();
      EXPECT_LT(largest_difference(parameters_of(*model), expected), kFloat32Tolerance) << "stage " << stage;
      EXPECT_TRUE(model->also_tied.is_same(model->tied->weight));
      // Trainable ones, the tied weight once, and the frozen ones.
      EXPECT_EQ(engine->fp32_state_dict().size(), 4u + 2u);
    });
  }
}

TEST(Training, RanksStartWithTheParametersOfRankZero) {
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model;
    {
      torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.add_(communicator.rank());
    }
    const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
    EXPECT_EQ(largest_difference(parameters_of(*model), parameters_of(*SmallNet())), 0.0);
  });
}

}  // namespace
}  // namespace ds::engine
