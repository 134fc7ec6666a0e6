// The section fp8 with the engine: stages, ranks, checkpoints, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "dsengine/activation_checkpoint.h"
#include "dsengine/errors.h"
#include "layers/fp8/linear.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/thrown.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using ::testing::HasSubstr;

constexpr int64_t kIn = 32;
constexpr int64_t kHidden = 48;

struct WideNetImpl : torch::nn::Module {
  WideNetImpl() {
    first = register_module("first", torch::nn::Linear(kIn, kHidden));
    middle = register_module("middle", torch::nn::Linear(torch::nn::LinearOptions(kHidden, kHidden).bias(false)));
    last = register_module("last", torch::nn::Linear(kHidden, 5));
    fill(*this);
  }
  at::Tensor body(const at::Tensor& x) { return torch::tanh(middle(torch::tanh(first(x)))); }
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor typed = x.to(first->weight.scalar_type());
    const at::Tensor hidden =
        recomputed ? recompute::checkpoint([this](const at::Tensor& y) { return body(y); }, typed) : body(typed);
    return (last(hidden) - typed.narrow(1, 0, 5).sin()).pow(2).mean();
  }
  bool recomputed = false;
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
TORCH_MODULE(WideNet);

at::Tensor batch_of(int64_t micro_batch, int rank) {
  const at::Tensor steps =
      torch::arange(4 * kIn, torch::kDouble) * 1.3 + static_cast<double>(17 * micro_batch + 5 * rank);
  return (torch::cos(steps) * (1 + rank)).view({4, kIn}).to(torch::kFloat);
}

ordered_json fp8_config(int stage, int accumulation = 2, ordered_json more = ordered_json::object()) {
  ordered_json config = small_config(stage, accumulation);
  config["fp8"] = {{"enabled", true}, {"emulate", true}, {"exclude", {"last"}}, {"amax_history_len", 3}};
  config["fp8"].update(more);
  return config;
}

std::vector<double> losses_of(Engine& engine, WideNet& model, int64_t first, int64_t steps) {
  const int64_t accumulation = engine.gradient_accumulation_steps();
  std::vector<double> losses;
  for (int64_t micro = first * accumulation; micro < (first + steps) * accumulation; ++micro) {
    const at::Tensor loss = model->loss(batch_of(micro, engine.global_rank()));
    engine.backward(loss);
    engine.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

struct Fp8Run {
  std::vector<double> losses;
  State weights;
};

Fp8Run run_of(const ordered_json& config, comm::Communicator& ranks, bool recomputed = false) {
  WideNet model;
  model->recomputed = recomputed;
  const auto engine = start(model.ptr(), config, ranks).engine;
  Fp8Run run;
  run.losses = losses_of(*engine, model, 0, 5);
  run.weights = copy_of(engine->fp32_state_dict());
  return run;
}

// One rank: torch's AdamW on a model whose layers have the same recipe.
TEST(Fp8Engine, TrainsAsAPlainLoopWithTheRecipe) {
  run_ranks(1, [](comm::Communicator& ranks) {
    WideNet model;
    std::vector<fp8::NamedLinear> layers = fp8::linears_of(*model);
    ASSERT_EQ(layers.size(), 3U);
    layers.pop_back();
    const auto scaling =
        std::make_shared<fp8::Scaling>(fp8::ScalingOptions{.history = 3, .arithmetic = fp8::Arithmetic::kEmulated},
                                       std::vector<std::string>{"first", "middle"}, c10::kCPU);
    fp8::set_layers(layers, scaling);
    torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    std::vector<double> expected;
    for (int64_t step = 0; step < 5; ++step) {
      adamw.zero_grad();
      for (int64_t micro = 2 * step; micro < 2 * step + 2; ++micro) {
        const at::Tensor loss = model->loss(batch_of(micro, 0));
        (loss / 2).backward();
        expected.push_back(loss.item<double>());
      }
      adamw.step();
      scaling->end_step(ranks);
    }
    const Fp8Run found = run_of(fp8_config(1), ranks);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found.losses[i], expected[i], 1e-4) << i;
    EXPECT_LT(largest_difference(found.weights, parameters_of(*model)), 2e-3);
    const Fp8Run without = run_of(fp8_config(1, 2, {{"enabled", false}}), ranks);
    EXPECT_GT(std::abs(without.losses[3] - expected[3]), 1e-5) << "FP8 is seen in the loss";
  });
}

// The bits of stage 0: sums of two ranks have one order.
TEST(Fp8Engine, EveryStageTrainsAlikeAlsoWhenItIsComputedAgain) {
  for (const char* precision : {"float32", "bf16"}) {
    run_ranks(2, [&](comm::Communicator& ranks) {
      const auto config_of = [&](int stage, int accumulation) {
        ordered_json config = fp8_config(stage, accumulation);
        if (std::string(precision) == "bf16") config["bf16"] = {{"enabled", true}};
        return config;
      };
      const Fp8Run expected = run_of(config_of(0, 1), ranks);
      for (const int stage : {0, 1, 2, 3}) {
        for (const bool recomputed : {false, true}) {
          const Fp8Run found = run_of(config_of(stage, 1), ranks, recomputed);
          EXPECT_EQ(found.losses, expected.losses) << precision << ", stage " << stage << ", again " << recomputed;
          EXPECT_EQ(largest_difference(found.weights, expected.weights), 0.0) << precision << ", stage " << stage;
        }
        // Stages add up micro-batches in different orders.
        const Fp8Run plain = run_of(config_of(stage, 2), ranks);
        EXPECT_EQ(run_of(config_of(stage, 2), ranks, /*recomputed=*/true).losses, plain.losses) << stage;
      }
    });
  }
}

TEST(Fp8Engine, OtherRecipesTrain) {
  run_ranks(1, [](comm::Communicator& ranks) {
    const Fp8Run plain = run_of(fp8_config(2, 2, {{"enabled", false}}), ranks);
    for (const ordered_json& more : std::vector<ordered_json>{{{"recipe", "current"}},
                                                              {{"format", "e4m3"}, {"margin", 1}},
                                                              {{"amax_compute_algo", "most_recent"}},
                                                              {{"fp8_wgrad", true}}}) {
      const Fp8Run found = run_of(fp8_config(2, 2, more), ranks);
      EXPECT_LT(found.losses.back(), 0.8 * found.losses.front()) << more.dump();
      EXPECT_NE(found.losses.back(), plain.losses.back()) << more.dump();
    }
  });
}

TEST(Fp8Engine, GoesOnFromACheckpointOfAnotherStageBitByBit) {
  const test::ScratchFolder folder;
  run_ranks(2, [&](comm::Communicator& ranks) {
    std::vector<double> expected;
    {
      WideNet model;
      const auto engine = start(model.ptr(), fp8_config(3, 1), ranks).engine;
      losses_of(*engine, model, 0, 4);
      engine->save_checkpoint(folder.path().string());
      expected = losses_of(*engine, model, 4, 3);
    }
    WideNet model;
    const auto engine = start(model.ptr(), fp8_config(1, 1), ranks).engine;
    losses_of(*engine, model, 0, 1);  // scales of its own
    engine->load_checkpoint(folder.path().string());
    EXPECT_EQ(losses_of(*engine, model, 4, 3), expected);
  });
}

// What layers remember: amax of steps, and scales.
at::Tensor memory_of(WideNet& model) {
  const auto layer = fp8::find_layer(model->first->weight);
  const auto scaling = layer->scaling.lock();
  return torch::cat({scaling->memory(0), scaling->memory(1)}, 1);
}

void train_one(Engine& engine, WideNet& model, int64_t step, double factor = 1.0) {
  engine.backward(model->loss(batch_of(step, engine.global_rank())).to(torch::kFloat) * factor);
  engine.step();
}

// float16, with the loss scale that follows: rows of gradients are those of the scaled loss.
TEST(Fp8Engine, ASkippedStepLeavesNoTraceAndGradientsFollowTheLossScale) {
  run_ranks(2, [](comm::Communicator& ranks) {
    ordered_json config = fp8_config(1, 1);
    config["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}, {"hysteresis", 1}, {"loss_scale_window", 100}};
    WideNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    for (int64_t step = 0; step < 4; ++step) train_one(*engine, model, step);
    ASSERT_TRUE(engine->was_step_applied());
    const at::Tensor before = memory_of(model);
    const double scale = engine->loss_scale();
    train_one(*engine, model, 4, 1e9);
    ASSERT_FALSE(engine->was_step_applied());
    ASSERT_EQ(engine->loss_scale(), scale / 2);
    const at::Tensor after = memory_of(model);
    EXPECT_TRUE(torch::equal(after.narrow(0, 0, 2), before.narrow(0, 0, 2)));
    const int64_t width = before.size(1) / 2;
    // The second layer's: the input of the first one needs no gradient.
    const at::Tensor had = before[2].narrow(0, width, width);
    const at::Tensor has = after[2].narrow(0, width, width);
    ASSERT_GT(had.min().item<float>(), 0);
    EXPECT_TRUE(torch::equal(has.narrow(0, 0, width - 1), had.narrow(0, 0, width - 1) * 0.5)) << "amax";
    EXPECT_EQ(has[width - 1].item<float>(), had[width - 1].item<float>() * 2) << "scale";
  });
}

TEST(Fp8Engine, WhatIsDroppedDoesNotCount) {
  run_ranks(1, [](comm::Communicator& ranks) {
    WideNet model;
    const auto engine = start(model.ptr(), fp8_config(1, 1), ranks).engine;
    WideNet other;
    const auto expected = start(other.ptr(), fp8_config(1, 1), ranks).engine;
    for (int64_t step = 0; step < 3; ++step) {
      engine->backward(model->loss(batch_of(step, 0) * 50) * 100);
      engine->zero_grad();
      train_one(*engine, model, step);
      train_one(*expected, other, step);
    }
    EXPECT_TRUE(torch::equal(memory_of(model), memory_of(other)));
  });
}

TEST(Fp8Engine, AStepThatThrowsDoesNotCount) {
  run_ranks(1, [](comm::Communicator& ranks) {
    ordered_json config = fp8_config(1, 1);
    config["non_finite_gradients"] = "error";
    WideNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    for (int64_t step = 0; step < 3; ++step) train_one(*engine, model, step);
    const at::Tensor before = memory_of(model);
    EXPECT_THROW(train_one(*engine, model, 3, std::numeric_limits<double>::infinity()), NonFiniteError);
    EXPECT_TRUE(torch::equal(memory_of(model), before));
    train_one(*engine, model, 4);
    EXPECT_FALSE(torch::equal(memory_of(model), before));
  });
}

// Other weights than those that the scales are of.
TEST(Fp8Engine, WeightsWithoutStatesBeginWithoutScales) {
  const test::ScratchFolder folder;
  run_ranks(1, [&](comm::Communicator& ranks) {
    WideNet model;
    const auto engine = start(model.ptr(), fp8_config(1, 1), ranks).engine;
    train_one(*engine, model, 0);
    engine->save_checkpoint(folder.path().string());
    train_one(*engine, model, 1);
    EXPECT_GT(memory_of(model).abs().max().item<float>(), 0);
    engine->load_checkpoint(folder.path().string(), "", {.load_module_only = true});
    EXPECT_EQ(memory_of(model).abs().max().item<float>(), 0);
  });
}

// FP8 ends with the engine.
TEST(Fp8Engine, AModelWithoutItsEngineIsPlain) {
  run_ranks(1, [](comm::Communicator& ranks) {
    WideNet model;
    const at::Tensor x = batch_of(0, 0);
    const double plain = model->loss(x).item<double>();
    {
      const auto engine = start(model.ptr(), fp8_config(0), ranks).engine;
      EXPECT_NE(model->loss(x).item<double>(), plain);
    }
    EXPECT_EQ(model->loss(x).item<double>(), plain);
  });
}

std::string refusal_of(const ordered_json& config, const std::shared_ptr<torch::nn::Module>& model) {
  std::string text = "none";
  run_ranks(1, [&](comm::Communicator& ranks) {
    text = test::thrown_by<ConfigError>([&] { start(model, config, ranks); }, "none");
  });
  return text;
}

TEST(Fp8Engine, NamesWhatDoesNotFit) {
  const auto of = [](const ordered_json& more) { return refusal_of(fp8_config(0, 1, more), WideNet().ptr()); };
  EXPECT_THAT(of({{"emulate", false}}), HasSubstr("expected a GPU with FP8"));
  EXPECT_THAT(of({{"exclude", ordered_json::array()}}),
              HasSubstr("layer last: expected in_features and out_features that are multiples of 16, found 48 and 5"));
  EXPECT_THAT(of({{"exclude", {"lst"}}}), HasSubstr("fp8.exclude: expected \"lst\" to be the name of a Linear layer"));
  EXPECT_THAT(of({{"modules", {"h.*"}}}), HasSubstr("found none among first, middle, last"));
  EXPECT_THAT(of({{"exclude", {"*"}}}), HasSubstr("expected it to leave a layer"));
  WideNet twice;  // a layer under two names is meant by either
  twice->register_module("head", twice->last.ptr());
  for (const char* name : {"last", "head"}) {
    EXPECT_EQ(refusal_of(fp8_config(0, 1, {{"exclude", {name}}}), twice.ptr()), "none") << name;
  }
  EXPECT_THAT(of({{"granularity", "block"}}), HasSubstr("expected \"current\" with granularity \"block\""));
  EXPECT_THAT(of({{"granularity", "block"}, {"recipe", "current"}}), HasSubstr("multiples of 128"));
  EXPECT_THAT(of({{"amax_history_len", 0}}), HasSubstr("amax_history_len"));
  WideNet wide;
  wide->to(torch::kDouble);
  EXPECT_THAT(refusal_of(fp8_config(0, 1), wide.ptr()), HasSubstr("found Double"));
}

}  // namespace
}  // namespace ds::engine
