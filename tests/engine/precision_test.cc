// Loss scaling, skipped steps, autocast.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "model/state/kept_buffers.h"
#include "optim/loss_scaler.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;

ordered_json fp16_config(int stage) {
  ordered_json config = small_config(stage, 1);
  config["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}, {"loss_scale_window", 3}, {"hysteresis", 1}};
  config["scheduler"] = {{"type", "WarmupLR"},
                         {"params", {{"warmup_min_lr", 0.01}, {"warmup_max_lr", 0.02}, {"warmup_num_steps", 10}}}};
  return config;
}

// A loss whose gradient is infinite on one rank only.
at::Tensor poisoned(SmallNet& model, const at::Tensor& x, bool poison) {
  const at::Tensor loss = model->loss(x);
  return poison ? loss * std::numeric_limits<float>::infinity() : loss;
}

class Fp16Test : public ::testing::TestWithParam<int> {};

TEST_P(Fp16Test, AnOverflowOfOneRankSkipsTheStepOfAllAndHalvesTheScale) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const Initialized parts = start(model.ptr(), fp16_config(GetParam()), communicator);
    Engine& engine = *parts.engine;
    EXPECT_TRUE(engine.dynamic_loss_scale());
    EXPECT_EQ(engine.loss_scale(), 256);
    const State before = copy_of(engine.fp32_state_dict());
    const std::vector<double> rate = engine.get_lr();
    engine.backward(poisoned(model, sample(0, communicator.rank()), communicator.rank() == 1));
    engine.step();
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.skipped_steps(), 1);
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_EQ(engine.loss_scale(), 128);
    EXPECT_EQ(engine.get_lr(), rate);
    EXPECT_EQ(engine.get_global_grad_norm(), std::numeric_limits<double>::infinity());
    EXPECT_EQ(largest_difference(copy_of(engine.fp32_state_dict()), before), 0.0);
    // The next step is a good one.
    engine.backward(model->loss(sample(1, communicator.rank())));
    engine.step();
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_GT(largest_difference(copy_of(engine.fp32_state_dict()), before), 0.0);
  });
}

TEST_P(Fp16Test, TheScaleDoublesAfterAWindowAndNeverChangesTheGradient) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), fp16_config(GetParam()), communicator).engine;
    SmallNet reference;
    for (at::Tensor& parameter : reference->parameters())
      parameter.set_data(parameter.to(torch::kHalf).to(torch::kFloat));
    double largest_scale = 0;
    for (int64_t micro = 0; micro < 8; ++micro) {
      engine->backward(model->loss(sample(micro, communicator.rank())));
      if (micro == 0) {
        (reference->loss(sample(0, 0)) / 2).backward();
        (reference->loss(sample(0, 1)) / 2).backward();
      }
      engine->step();
      largest_scale = std::max(largest_scale, engine->loss_scale());
      if (micro > 0) continue;
      double squares = 0;
      for (const at::Tensor& parameter : reference->parameters())
        squares += parameter.grad().pow(2).sum().item<double>();
      EXPECT_NEAR(engine->get_global_grad_norm().value(), std::sqrt(squares), 0.01 * std::sqrt(squares));
    }
    EXPECT_GE(largest_scale, 1024);
    EXPECT_EQ(engine->skipped_steps(), 0);
  });
}

TEST_P(Fp16Test, TrainingStaysNearFloat32) {
  const State expected = TorchRun{.world = 2, .steps = 5}.train_adamw(2e-3);
  for (const double loss_scale : {0.0, 64.0}) {
    ordered_json config = small_config(GetParam(), 1);
    config["optimizer"]["params"]["lr"] = 2e-3;
    config["fp16"] = {{"enabled", true}, {"loss_scale", loss_scale}, {"initial_scale_power", 8}};
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      EXPECT_EQ(engine->dynamic_loss_scale(), loss_scale == 0);
      // Adam turns a changed sign of a tiny gradient into two learning rates of difference.
      EXPECT_LT(largest_difference(train(*engine, model, 5), expected), 2 * 5 * 2e-3);
      EXPECT_EQ(engine->skipped_steps(), 0);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Fp16Test, ::testing::Values(0, 1, 2, 3),
                         [](const auto& variant) { return cat("Stage", variant.param); });

TEST(Fp16, AGradientThatOverflowsAtTheSmallestScaleEndsTheRun) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = fp16_config(1);  // stage 0 goes on, as DeepSpeed's does
    config["fp16"]["initial_scale_power"] = 0;
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->backward(poisoned(model, sample(0, 0), true));
    EXPECT_THROW(engine->step(), optimizers::LossScaleError);
  });
}

TEST(Fp16, ForwardCastsInputsOnlyWhenAsked) {
  for (const bool cast : {false, true}) {
    ordered_json config = fp16_config(0);
    config["fp16"]["auto_cast"] = cast;
    run_ranks(1, [&](comm::Communicator& communicator) {
      // Anything with forward(), here one that tells what it was given.
      struct Seen : torch::nn::Module {
        Seen() { weight = register_parameter("weight", torch::ones({2})); }
        std::string forward(const at::Tensor& x, const at::Tensor& tokens, int64_t plain) const {
          return cat(x.scalar_type(), ' ', tokens.scalar_type(), ' ', plain);
        }
        at::Tensor weight;
      };
      const auto model = std::make_shared<Seen>();
      const auto engine = start(model, config, communicator).engine;
      EXPECT_EQ(engine->forward(model, torch::ones({2}), torch::ones({2}, torch::kLong), int64_t{7}),
                cast ? "Half Long 7" : "Float Long 7");
    });
  }
}

TEST(Bfloat16, StepsThatAreNotFiniteAreSkippedUnlessSwitchedOff) {
  for (const bool check : {true, false}) {
    ordered_json config = small_config(1, 1);
    config["bf16"] = {{"enabled", true}, {"check_grad_overflow", check}};
    run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      engine->backward(poisoned(model, sample(0, communicator.rank()), communicator.rank() == 0));
      engine->step();
      EXPECT_EQ(engine->skipped_steps(), check ? 1 : 0);
      EXPECT_EQ(engine->loss_scale(), 1.0);
    });
  }
}

TEST(Float32, ANormThatIsNotFiniteIsReported) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    ordered_json config = small_config(2, 1);
    config["non_finite_gradients"] = "continue";
    const auto engine = start(model.ptr(), config, communicator).engine;
    engine->backward(poisoned(model, sample(0, communicator.rank()), communicator.rank() == 1));
    engine->step();
    EXPECT_FALSE(std::isfinite(engine->get_global_grad_norm().value()));
  });
}

TEST(Autocast, ForwardRunsInTheLowerPrecisionAndNothingElseDoes) {
  ordered_json config = small_config(1, 1);
  config["torch_autocast"] = {{"enabled", true}, {"dtype", "bfloat16"}};
  const State expected = TorchRun{.world = 2, .steps = 3}.train_adamw(2e-3);
  config["optimizer"]["params"]["lr"] = 2e-3;
  run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    {
      const auto engine = start(model.ptr(), config, communicator).engine;
      EXPECT_EQ(model->forward(sample(0, 0)).scalar_type(), at::kBFloat16);
      EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
      // A cast weight that survived its update would keep the first step's values.
      EXPECT_LT(largest_difference(train(*engine, model, 3), expected), 2 * 3 * 2e-3);
      EXPECT_EQ(model->first->weight.grad().defined() ? model->first->weight.grad().scalar_type() : at::kFloat,
                at::kFloat);
    }
    EXPECT_EQ(model->forward(sample(0, 0)).scalar_type(), at::kFloat);  // off again with the engine's end
  });
}

TEST(DataTypes, BuffersAreCastUnlessTheConfigSaysOtherwise) {
  struct WithBuffer : torch::nn::Module {
    WithBuffer() {
      weight = register_parameter("weight", torch::ones({4}));
      buffer = register_buffer("buffer", torch::ones({4}));
      counter = register_buffer("counter", torch::zeros({1}, torch::kLong));
    }
    at::Tensor weight, buffer, counter;
  };
  ordered_json config = small_config(0, 1);
  config["bf16"]["enabled"] = true;
  run_ranks(1, [&](comm::Communicator& communicator) {
    auto untouched = std::make_shared<WithBuffer>();
    config["data_types"]["buffer_dtype"] = "fp32";
    const auto first = start(untouched, config, communicator);
    EXPECT_EQ(untouched->buffer.scalar_type(), at::kFloat);
    EXPECT_EQ(untouched->weight.scalar_type(), at::kBFloat16);
    config.erase("data_types");  // as DeepSpeed's module.bfloat16()
    auto cast = std::make_shared<WithBuffer>();
    const auto second = start(cast, config, communicator);
    EXPECT_EQ(cast->buffer.scalar_type(), at::kBFloat16);
    EXPECT_EQ(cast->counter.scalar_type(), at::kLong);
  });
}

// A router whose bias chooses experts: values that bfloat16 cannot tell apart.
struct RouterImpl : torch::nn::Module {
  RouterImpl() {
    gate = register_module("gate", torch::nn::Linear(6, 4));
    bias = register_buffer("e_score_correction_bias", torch::tensor({5.001F, 5.002F, 5.003F, 5.004F}));
    running = register_buffer("running", torch::tensor({5.001F, 5.002F, 5.003F, 5.004F}));
    counter = register_buffer("e_score_count", torch::zeros({1}, torch::kLong));
    fill(*this);
  }
  at::Tensor loss(const at::Tensor& x) { return (gate(x.to(torch::kBFloat16)) + bias).pow(2).mean(); }

  torch::nn::Linear gate{nullptr};
  at::Tensor bias, running, counter;
};
TORCH_MODULE(Router);

class KeptBuffers : public ::testing::TestWithParam<int> {};

TEST_P(KeptBuffers, StayFloat32WhatEverTheOthersAre) {
  ordered_json config = small_config(GetParam(), 1);
  config["bf16"]["enabled"] = true;
  config["data_types"] = {{"keep_in_fp32_modules", {"score_*_bias"}}, {"buffer_dtype", "bf16"}};
  run_ranks(2, [&](comm::Communicator& communicator) {
    Router model;
    const at::Tensor before = model->bias.clone();
    model->bias.set_data(model->bias.to(torch::kDouble));  // whatever it comes in
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_EQ(model->bias.scalar_type(), at::kFloat);
    EXPECT_TRUE(model->bias.equal(before));
    EXPECT_EQ(model->running.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->counter.scalar_type(), at::kLong);
    EXPECT_EQ(model->gate->weight.scalar_type(), at::kBFloat16);
    const at::Tensor loss = model->loss(sample(0, communicator.rank()));
    EXPECT_EQ(loss.scalar_type(), at::kFloat);  // a sum with float32 is float32
    engine->backward(loss);
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
    EXPECT_TRUE(model->bias.equal(before));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, KeptBuffers, ::testing::Values(0, 2, 3));

TEST(KeptBufferNames, CountWhereBuffersAloneAreNarrow) {
  ordered_json config = small_config(0, 1);
  config["data_types"] = {{"keep_in_fp32_modules", {"e_score"}}, {"buffer_dtype", "bf16"}};
  run_ranks(1, [&](comm::Communicator& communicator) {
    Router model;
    const auto engine = start(model.ptr(), config, communicator).engine;
    EXPECT_EQ(model->bias.scalar_type(), at::kFloat);
    EXPECT_EQ(model->running.scalar_type(), at::kBFloat16);
    EXPECT_EQ(model->gate->weight.scalar_type(), at::kFloat);
  });
}

TEST(KeptBufferNames, ComeBackFromACheckpointAsTheyWere) {
  const test::ScratchFolder folder;
  ordered_json config = small_config(2, 1);
  config["bf16"]["enabled"] = true;
  config["data_types"]["keep_in_fp32_modules"] = {"e_score"};
  run_ranks(2, [&](comm::Communicator& communicator) {
    Router saved;
    const auto first = start(saved.ptr(), config, communicator).engine;
    saved->bias.add_(0.0005);
    first->save_checkpoint(folder.path(), "tag");
    Router loaded;
    const auto second = start(loaded.ptr(), config, communicator).engine;
    second->load_checkpoint(folder.path(), "tag");
    EXPECT_EQ(loaded->bias.scalar_type(), at::kFloat);
    EXPECT_TRUE(loaded->bias.equal(saved->bias));
  });
}

TEST(KeptBufferNames, ANameThatKeepsNothingIsTold) {
  ordered_json config = small_config(0, 1);
  config["bf16"]["enabled"] = true;
  config["data_types"]["keep_in_fp32_modules"] = {"gate", "router?", "e_score"};
  run_ranks(1, [&](comm::Communicator& communicator) {
    Router model;
    ::testing::internal::CaptureStderr();
    const auto engine = start(model.ptr(), config, communicator).engine;
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, ::testing::HasSubstr("\"gate\" has no effect: it is in names of parameters alone"));
    EXPECT_THAT(log, ::testing::HasSubstr("\"router?\" has no effect: no floating-point buffer"));
    EXPECT_THAT(log, ::testing::Not(::testing::HasSubstr("\"e_score\"")));
  });
}

TEST(KeptBufferNames, ANameIsFoundAnywhereWithStarsForAnyText) {
  EXPECT_TRUE(is_found_in("score_correction", "layers.3.mlp.e_score_correction_bias"));
  EXPECT_TRUE(is_found_in("layers.*.bias", "model.layers.3.mlp.bias_of_experts"));
  EXPECT_FALSE(is_found_in("layers.*.weight", "model.layers.3.mlp.bias"));
  EXPECT_FALSE(is_found_in("b?as", "model.bias"));  // only the star is special
  EXPECT_TRUE(is_found_in("[x]", "a[x]b"));
}

}  // namespace
}  // namespace ds::engine
