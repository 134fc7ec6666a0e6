// After something went wrong, beside another engine, and at the end of an engine's life.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/check.h"
#include "optim/loss_scaler.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr double kTolerance = 2e-6;

// Throws when its gradient is computed.
struct Explosive : torch::autograd::Function<Explosive> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list /*gradients*/) {
    throw std::runtime_error("the gradient exploded");
  }
};

class RecoveryTest : public ::testing::TestWithParam<int> {};

TEST_P(RecoveryTest, ABackwardThatThrowsIsForgottenByZeroGrad) {
  const State expected = TorchRun{.world = 2, .steps = 2}.train_adamw();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const at::Tensor x = sample(7, communicator.rank());
    EXPECT_THROW(engine->backward(Explosive::apply(model->first(x)).pow(2).mean() + model->loss(x)), std::exception);
    EXPECT_THAT([&] { engine->backward(model->loss(x)); }, ThrowsMessage<UsageError>(HasSubstr("zero_grad()")));
    engine->zero_grad();
    EXPECT_LT(largest_difference(train(*engine, model, 2), expected), kTolerance);
  });
}

TEST_P(RecoveryTest, ParametersAreWholeWhenTheEngineIsGone) {
  const State expected = TorchRun{.world = 3, .steps = 1}.train_adamw();
  run_ranks(3, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    const State before = GetParam() == 3 ? copy_of(engine->module_state_dict()) : State();
    engine.reset();
    if (GetParam() == 3) {  // slices leave with the engine: an error, not a fault
      EXPECT_LT(largest_difference(before, expected), kTolerance);
      EXPECT_THROW(model->loss(sample(0, 0)), c10::Error);
      return;
    }
    EXPECT_LT(largest_difference(parameters_of(*model), expected), kTolerance);
  });
}

TEST_P(RecoveryTest, TwoEnginesOfOneThreadStepInTurn) {
  const State expected = TorchRun{.world = 2, .steps = 3}.train_adamw();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet a;
    SmallNet b;
    const auto first = start(a.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto second = start(b.ptr(), small_config(GetParam(), 1), communicator).engine;
    for (int64_t step = 0; step < 3; ++step) {
      first->backward(a->loss(sample(step, communicator.rank())));
      first->step();
      second->backward(b->loss(sample(step, communicator.rank())));
      second->step();
    }
    EXPECT_LT(largest_difference(copy_of(first->fp32_state_dict()), expected), kTolerance);
    EXPECT_LT(largest_difference(copy_of(second->fp32_state_dict()), expected), kTolerance);
  });
}

TEST_P(RecoveryTest, AParameterThatOneRankLeftOutEndsTheStepOfAllRanks) {
  ordered_json config = small_config(GetParam(), 1);
  config["zero_optimization"]["ignore_unused_parameters"] = false;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const at::Tensor x = sample(0, communicator.rank());
    const auto loss_of = [&] { return communicator.rank() == 0 ? model->loss(x) : model->first(x).pow(2).mean(); };
    if (GetParam() == 3) {  // found before any gradient is made: rank 0 gathers what rank 1 does not want
      EXPECT_THAT([&] { engine->backward(loss_of()); },
                  ThrowsMessage<std::exception>(AllOf(HasSubstr("norm."), HasSubstr("start of backward"))));
      return;
    }
    engine->backward(loss_of());
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(HasSubstr(communicator.rank() == 0 ? "on another rank" : "last.weight")));
  });
}

// As if the step had not been asked for.
TEST_P(RecoveryTest, AStepThatIsRefusedCountsForNothing) {
  const State expected = TorchRun{.world = 2, .accumulation = 2, .steps = 2}.train_adamw();
  ordered_json config = small_config(GetParam(), 2);
  config["zero_optimization"]["ignore_unused_parameters"] = false;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const auto refused = [&] {
      engine->backward(model->first(sample(9, communicator.rank())).pow(2).mean());
      engine->step();
      engine->backward(model->first(sample(8, communicator.rank())).pow(2).mean());
      EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("last.weight")));
    };
    refused();
    EXPECT_EQ(engine->global_steps(), 0);
    EXPECT_EQ(engine->global_samples(), 0);
    EXPECT_EQ(engine->micro_steps(), 0);
    EXPECT_LT(largest_difference(train(*engine, model, 2), expected), kTolerance);
    refused();
    EXPECT_EQ(engine->global_steps(), 2);
    EXPECT_EQ(engine->skipped_steps(), 0);
  });
}

TEST_P(RecoveryTest, APassWithoutReductionLeavesNoMemoryBehind) {
  ordered_json config = small_config(GetParam(), 1);
  config["zero_optimization"]["reduce_bucket_size"] = 20;
  config["managed_gradient_accumulation"] = false;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    {
      const auto guard = engine->no_sync();
      engine->backward(model->loss(sample(0, communicator.rank())));
    }
    engine->backward(model->loss(sample(1, communicator.rank())));
    engine->step();
    train(*engine, model, 2);
    const int64_t bytes = engine->model_state_bytes().gradients;
    if (GetParam() < 2) {
      EXPECT_EQ(bytes, engine->plan().bytes->gradients);
    } else {
      // Own slices of all 288 elements, and some buckets, but no longer every one.
      EXPECT_LT(bytes, (144 + 288) * 4);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, RecoveryTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& variant) { return cat("Stage", variant.param); });

TEST(Recovery, GradientsFromBeforeInitializeDoNotCount) {
  const State expected = TorchRun{.world = 2, .steps = 1}.train_adamw();
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    model->loss(sample(9, 0)).backward();
    const auto engine = start(model.ptr(), small_config(2, 1), communicator).engine;
    EXPECT_LT(largest_difference(train(*engine, model, 1), expected), kTolerance);
  });
}

TEST(Recovery, AModelBelongsToOneEngine) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto first = start(model.ptr(), small_config(0, 1), communicator).engine;
    EXPECT_THAT([&] { start(model.ptr(), small_config(2, 1), communicator); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("first.weight"), HasSubstr("another engine"))));
    first.reset();
    const auto second = start(model.ptr(), small_config(2, 1), communicator).engine;
    EXPECT_GT(second->backward(model->loss(sample(0, 0))).item<double>(), 0);
  });
}

TEST(Recovery, ALossScaleThatCannotFallLeavesAnEngineThatGoesOn) {
  ordered_json config = small_config(1, 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 0}, {"hysteresis", 1}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    const State before = copy_of(engine->fp32_state_dict());
    engine->backward(model->loss(sample(0, communicator.rank())) * std::numeric_limits<float>::infinity());
    EXPECT_THROW(engine->step(), optimizers::LossScaleError);
    EXPECT_EQ(engine->global_steps(), 1);
    EXPECT_EQ(engine->skipped_steps(), 1);
    engine->backward(model->loss(sample(1, communicator.rank())));
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
    EXPECT_GT(largest_difference(copy_of(engine->fp32_state_dict()), before), 0.0);
  });
}

TEST(Recovery, SmallGradientsSurviveClippingByValueInFloat16) {
  // True gradients of about 1e-8, far below float16's smallest number, under a loss scale of 65536.
  struct Tiny : torch::nn::Module {
    Tiny() { weight = register_parameter("weight", torch::zeros({64})); }
    at::Tensor weight;
  };
  ordered_json config = small_config(1, 1);
  config["fp16"] = {{"enabled", true}, {"loss_scale", 65536}};
  config["gradient_clip_by_value"] = 1.0;
  config["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 1e6}}}};
  config["zero_allow_untested_optimizer"] = true;
  run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<Tiny>();
    const auto engine = start(model, config, communicator).engine;
    engine->backward((model->weight.to(torch::kFloat) * 1e-8).sum());
    engine->step();
    const at::Tensor weight = engine->fp32_state_dict().front().second;
    EXPECT_NEAR(weight.mean().item<double>(), -1e-2, 1e-4);
  });
}

// Some weights may have the step by then, others not.
TEST(Recovery, AnUpdateThatFailsHalfWayIsNotGoneOnFrom) {
  struct Failing : torch::optim::SGD {
    using SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      if (fails) throw IoError("no more pages");
      return SGD::step(std::move(closure));
    }
    bool fails = false;
  };
  const test::ScratchFolder folder;
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto optimizer = std::make_shared<Failing>(model->parameters(), 0.1);
    const auto engine = initialize({.model = model.ptr(),
                                    .config = small_config(0, 1),
                                    .optimizer = optimizer,
                                    .communicator = borrowed(communicator)})
                            .engine;
    train(*engine, model, 1);
    engine->save_checkpoint(folder.path().string());
    const State saved = copy_of(engine->fp32_state_dict());
    engine->backward(model->loss(sample(1, 0)));
    optimizer->fails = true;
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<IoError>(HasSubstr("no more pages")));
    optimizer->fails = false;
    EXPECT_EQ(engine->global_steps(), 1);
    const auto refused = ThrowsMessage<UsageError>(AllOf(HasSubstr("step() had failed"), HasSubstr("load")));
    EXPECT_THAT([&] { engine->backward(model->loss(sample(1, 0))); }, refused);
    EXPECT_THAT([&] { engine->save_checkpoint(folder.path().string()); }, refused);
    EXPECT_THAT([&] { engine->load_checkpoint(folder.path().string(), "", {.load_optimizer_states = false}); },
                ThrowsMessage<UsageError>(HasSubstr("load them too")));
    engine->load_checkpoint(folder.path().string());
    EXPECT_EQ(largest_difference(copy_of(engine->fp32_state_dict()), saved), 0.0);
    engine->backward(model->loss(sample(1, 0)));
    engine->step();
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

// A parameter that only one rank uses, and two losses on different parameters before one step.
TEST(Recovery, AClientOptimizerUpdatesAllRanksAlike) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), 0.1);
    ordered_json config = small_config(0, 1);
    const auto engine =
        initialize({.model = model.ptr(), .config = config, .optimizer = sgd, .communicator = borrowed(communicator)})
            .engine;
    const State before = parameters_of(*model);
    const at::Tensor x = sample(0, communicator.rank());
    if (communicator.rank() == 0) {
      engine->backward(model->loss(x));
    } else {
      engine->backward(model->first(x).pow(2).mean());
    }
    engine->backward(model->first(x).mean());
    engine->step();
    const State after = parameters_of(*model);
    EXPECT_GT((after.at("last.weight") - before.at("last.weight")).abs().max().item<double>(), 0);
    // Both ranks hold the same weights.
    for (const auto& [name, tensor] : after) {
      const at::Tensor largest = tensor.clone();
      communicator.all_reduce(largest, comm::ReduceOp::kMax).wait();
      EXPECT_TRUE(largest.equal(tensor)) << name;
    }
  });
}

TEST(Recovery, AClientOptimizerFollowsTheScheduleOfTheConfig) {
  ordered_json config = small_config(0, 1);
  config["scheduler"] = {{"type", "WarmupLR"}, {"params", {{"warmup_max_lr", 0.1}, {"warmup_num_steps", 4}}}};
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto sgd = std::make_shared<torch::optim::SGD>(model->parameters(), 0.5);
    const Initialized parts =
        initialize({.model = model.ptr(), .config = config, .optimizer = sgd, .communicator = borrowed(communicator)});
    ASSERT_NE(parts.schedule, nullptr);
    EXPECT_EQ(parts.engine->plan().optimizer, "");
    EXPECT_EQ(parts.engine->plan().bytes->optimizer, 0);
    train(*parts.engine, model, 5);
    EXPECT_DOUBLE_EQ(parts.engine->get_lr().front(), 0.1);
    // What steps on whole parameters has their gradients as they are.
    struct OwnSgd : torch::optim::SGD {
      using SGD::SGD;
    };
    config["data_types"]["grad_accum_dtype"] = "bf16";
    SmallNet other;
    EXPECT_THAT(
        [&] {
          initialize({.model = other.ptr(),
                      .config = config,
                      .optimizer = std::make_shared<OwnSgd>(other->parameters(), 0.5),
                      .communicator = borrowed(communicator)});
        },
        ThrowsMessage<ConfigError>(HasSubstr("grad_accum_dtype")));
  });
}

}  // namespace
}  // namespace ds::engine
