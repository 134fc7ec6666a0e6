// Layers, tokens and lengths that a ds_config leaves out: the engine's training against a plain loop that draws alike.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "core/check.h"
#include "dsengine/efficiency.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using test::run_ranks;
using testing::HasSubstr;

constexpr int64_t kLayers = 4;
constexpr int kSteps = 12;
constexpr uint64_t kSeed = 1234;

struct Drops {
  std::shared_ptr<efficiency::ProgressiveLayerDrop> layers;
  std::shared_ptr<efficiency::RandomLtd> tokens;
};

// Tokens [batch, time, 6] through residual layers, which attend to earlier tokens by their mean.
struct ResidualNetImpl : torch::nn::Module {
  ResidualNetImpl() {
    for (int64_t i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
    fill(*this);
  }
  at::Tensor block(int64_t i, const at::Tensor& x) {
    const at::Tensor count = torch::arange(1, x.size(1) + 1, x.options()).view({1, -1, 1});
    return x + torch::tanh(blocks[static_cast<size_t>(i)](x.cumsum(1) / count));
  }
  at::Tensor loss(const at::Tensor& input, const Drops& drops) {
    at::Tensor x = input;
    for (int64_t i = 0; i < kLayers; ++i) {
      x = (*drops.layers)(i, kLayers, x, [&](const at::Tensor& all) {
        return (*drops.tokens)(i, all, [&](const at::Tensor& some, const at::Tensor&) { return block(i, some); });
      });
    }
    return (x - input.sin() * 3.0).pow(2).mean();
  }
  std::vector<torch::nn::Linear> blocks;
};
TORCH_MODULE(ResidualNet);

at::Tensor tokens_of(int64_t micro_batch, int rank) {
  const at::Tensor steps =
      torch::arange(4 * 8 * 6, torch::kDouble) * 1.3 + static_cast<double>(17 * micro_batch + 5 * rank);
  return torch::cos(steps).view({4, 8, 6}).to(torch::kFloat);
}

ordered_json config_of(int stage, int accumulation) {
  ordered_json config = small_config(stage, accumulation);
  config["log_level"] = "warning";
  config["progressive_layer_drop"] = {{"enabled", true}, {"theta", 0.3}, {"gamma", 0.5}};
  config["data_efficiency"] = {{"enabled", true}};
  config["data_efficiency"]["data_routing"] = {{"enabled", true}};
  config["data_efficiency"]["data_routing"]["random_ltd"] = {
      {"enabled", true},
      {"total_layer_num", kLayers},
      {"random_ltd_layer_num", 2},
      {"random_ltd_layer_id", {1, 2}},
      {"random_ltd_schedule", {{"min_value", 2}, {"max_value", 8}, {"schedule_type", "fixed_linear"}}}};
  config["data_efficiency"]["data_routing"]["random_ltd"]["random_ltd_schedule"]["schedule_config"] = {
      {"require_steps", kSteps}, {"seq_per_step", 2}};
  return config;
}

Drops drops_of(const std::shared_ptr<Engine>& engine) { return {progressive_layer_drop(engine), random_ltd(engine)}; }

// The formulas by themselves, one set of draws for each rank.
std::vector<Drops> plain_drops(int world, const int64_t& step) {
  std::vector<Drops> result;
  for (int rank = 0; rank < world; ++rank) {
    const auto state = [&step] { return efficiency::TrainingState{.optimizer_steps = step}; };
    result.push_back(
        {std::make_shared<efficiency::ProgressiveLayerDrop>(0.3, 0.5, kSeed, state),
         std::make_shared<efficiency::RandomLtd>(efficiency::RandomLtdOptions{.layers = {1, 2},
                                                                              .kept = {.min_difficulty = 2,
                                                                                       .max_difficulty = 8,
                                                                                       .total_curriculum_step = kSteps,
                                                                                       .difficulty_step = 2}},
                                                 kSeed, rank, state)});
  }
  return result;
}

std::vector<double> plain_losses(int world, int accumulation) {
  ResidualNet net;
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  std::vector<double> losses;
  int64_t step = 0;
  const std::vector<Drops> drops = plain_drops(world, step);
  for (; step < kSteps; ++step) {
    optimizer.zero_grad(/*set_to_none=*/false);
    double sum = 0;
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      for (int rank = 0; rank < world; ++rank) {
        const at::Tensor loss = net->loss(tokens_of(micro, rank), drops[static_cast<size_t>(rank)]) /
                                static_cast<double>(world * accumulation);
        loss.backward();
        sum += loss.item<double>();
      }
    }
    // A layer that the whole step has left out has a gradient of zero, as in the engine.
    for (at::Tensor& parameter : net->parameters()) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
    }
    losses.push_back(sum);
    optimizer.step();
  }
  return losses;
}

std::vector<double> engine_losses(Engine& engine, ResidualNet& net, const Drops& drops, int64_t first, int64_t last) {
  const int64_t accumulation = engine.gradient_accumulation_steps();
  std::vector<double> losses;
  for (int64_t step = first; step < last; ++step) {
    double sum = 0;
    for (int64_t micro = step * accumulation; micro < (step + 1) * accumulation; ++micro) {
      sum += engine.backward(net->loss(tokens_of(micro, engine.global_rank()), drops)).item<double>();
      engine.step();
    }
    at::Tensor mean = at::scalar_tensor(sum / engine.world_size(), at::kDouble).view({1});
    if (engine.world_size() > 1) engine.communicator().all_reduce(mean).wait();
    losses.push_back(mean.item<double>());
  }
  return losses;
}

TEST(Efficiency, LayersAndTokensAreLeftOutAsInAPlainLoop) {
  for (const int world : {1, 2, 4}) {
    for (const int stage : {0, 1, 2, 3}) {
      const int accumulation = stage % 2 + 1;
      const std::vector<double> expected = plain_losses(world, accumulation);
      run_ranks(world, [&](comm::Communicator& communicator) {
        ResidualNet net;
        const auto parts = start(net.ptr(), config_of(stage, accumulation), communicator);
        const std::vector<double> found = engine_losses(*parts.engine, net, drops_of(parts.engine), 0, kSteps);
        EXPECT_THAT(found, testing::Pointwise(testing::DoubleNear(5e-6), expected))
            << world << " ranks, stage " << stage;
      });
    }
  }
}

// A step that throws and is tried again is the step that it would have been.
TEST(Efficiency, AnUndoneStepDrawsAgainAsItDid) {
  const auto losses_of = [](bool fails) {
    std::vector<double> losses;
    run_ranks(1, [&](comm::Communicator& communicator) {
      ResidualNet net;
      const auto parts = start(net.ptr(), config_of(0, 1), communicator);
      const Drops drops = drops_of(parts.engine);
      losses = engine_losses(*parts.engine, net, drops, 0, 3);
      if (fails) {
        parts.engine->backward(net->loss(tokens_of(3, 0), drops) * std::numeric_limits<double>::quiet_NaN());
        EXPECT_THROW(parts.engine->step(), NonFiniteError);
        parts.engine->backward(net->loss(tokens_of(3, 0), drops));
        parts.engine->zero_grad();
      }
      for (const double loss : engine_losses(*parts.engine, net, drops, 3, 6)) losses.push_back(loss);
    });
    return losses;
  };
  EXPECT_EQ(losses_of(true), losses_of(false));
}

// On other ranks than before would be other samples; on the same ones all goes on bit for bit.
TEST(Efficiency, AResumedRunLeavesOutWhatTheRunWould) {
  const test::ScratchFolder folder;
  run_ranks(2, [&](comm::Communicator& communicator) {
    ResidualNet net;
    const auto parts = start(net.ptr(), config_of(2, 1), communicator);
    const Drops drops = drops_of(parts.engine);
    engine_losses(*parts.engine, net, drops, 0, 5);
    parts.engine->save_checkpoint(folder.path());
    const std::vector<double> expected = engine_losses(*parts.engine, net, drops, 5, kSteps);
    ResidualNet again;
    const auto resumed = start(again.ptr(), config_of(2, 1), communicator);
    const Drops same = drops_of(resumed.engine);
    ASSERT_TRUE(static_cast<bool>(resumed.engine->load_checkpoint(folder.path())));
    EXPECT_EQ(engine_losses(*resumed.engine, again, same, 5, kSteps), expected);
  });
}

TEST(Efficiency, EvaluationLeavesNothingOut) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    ResidualNet net;
    const auto parts = start(net.ptr(), config_of(0, 1), communicator);
    const Drops drops = drops_of(parts.engine);
    engine_losses(*parts.engine, net, drops, 0, 5);
    parts.engine->eval();
    const at::Tensor input = tokens_of(3, 0);
    at::Tensor x = input;
    for (int64_t i = 0; i < kLayers; ++i) x = net->block(i, x);
    EXPECT_TRUE(at::equal(net->loss(input, drops), (x - input.sin() * 3.0).pow(2).mean()));
  });
}

TEST(Efficiency, TheCurriculumCutsBatches) {
  run_ranks(2, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(1, 2);
    config["curriculum_learning"] = {
        {"enabled", true}, {"min_difficulty", 2}, {"max_difficulty", 6}, {"schedule_type", "fixed_discrete"}};
    config["curriculum_learning"]["schedule_config"] = {{"difficulty", {2, 4, 6}}, {"max_step", {1, 3}}};
    SmallNet net;
    const auto parts = start(net.ptr(), config, communicator);
    const auto lengths = curriculum(parts.engine);
    std::vector<int64_t> seen;
    for (int64_t micro = 0; micro < 10; ++micro) {
      const at::Tensor batch = lengths->truncate(at::ones({3, 7}), 1);
      EXPECT_EQ(batch.size(1), lengths->difficulty());
      seen.push_back(batch.size(1));
      parts.engine->backward(net->loss(sample(micro, communicator.rank())));
      parts.engine->step();
    }
    EXPECT_THAT(seen, testing::ElementsAre(2, 2, 4, 4, 4, 4, 6, 6, 6, 6)) << "of whole optimizer steps";
    EXPECT_EQ(lengths->truncate(at::ones({3, 5}), 1).size(1), 5) << "shorter than the difficulty";
    EXPECT_THROW(lengths->set_custom_schedule([](int64_t) { return 1; }), UsageError);
  });
}

TEST(Efficiency, ACurriculumOfTheProgram) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    ordered_json config = small_config(0, 1);
    config["curriculum_learning"] = {
        {"enabled", true}, {"min_difficulty", 2}, {"max_difficulty", 6}, {"schedule_type", "custom"}};
    SmallNet net;
    const auto parts = start(net.ptr(), config, communicator);
    const auto lengths = curriculum(parts.engine);
    EXPECT_THROW(lengths->difficulty(), UsageError) << "before there is a function";
    lengths->set_custom_schedule([](int64_t step) { return 10 * step; });
    EXPECT_EQ(lengths->difficulty(), 10);
    train(*parts.engine, net, 2);
    EXPECT_EQ(lengths->difficulty(), 30);
  });
}

TEST(Efficiency, SectionsThatAreOffChangeNothing) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    ResidualNet net;
    const auto parts = start(net.ptr(), small_config(0, 1), communicator);
    const auto lengths = curriculum(parts.engine);
    EXPECT_EQ(lengths->difficulty(), std::nullopt);
    const at::Tensor batch = at::ones({3, 7});
    EXPECT_TRUE(lengths->truncate(batch, 1).is_same(batch));
    const at::Tensor input = tokens_of(3, 0);
    at::Tensor x = input;
    for (int64_t i = 0; i < kLayers; ++i) x = net->block(i, x);
    EXPECT_TRUE(at::equal(net->loss(input, drops_of(parts.engine)), (x - input.sin() * 3.0).pow(2).mean()));
  });
}

// What the config asks for and the program does not do is an error at the first step, not a silence.
TEST(Efficiency, AProgramThatNeverAsksIsTold) {
  const auto message = [](const ordered_json& more) {
    std::string text;
    run_ranks(1, [&](comm::Communicator& communicator) {
      ordered_json config = small_config(0, 1);
      config.update(more);
      SmallNet net;
      const auto parts = start(net.ptr(), config, communicator);
      parts.engine->backward(net->loss(sample(0, 0)));
      try {
        parts.engine->step();
      } catch (const UsageError& error) {
        text = error.what();
      }
    });
    return text;
  };
  EXPECT_THAT(message({{"progressive_layer_drop", {{"enabled", true}, {"theta", 0.5}}}}),
              HasSubstr("expected a call of engine::progressive_layer_drop(engine) before the first step"));
  EXPECT_THAT(
      message({{"curriculum_learning",
                {{"enabled", true}, {"min_difficulty", 2}, {"max_difficulty", 6}, {"schedule_type", "custom"}}}}),
      HasSubstr("expected a call of engine::curriculum(engine)"));
  EXPECT_THAT(message({{"data_efficiency", config_of(0, 1)["data_efficiency"]}}),
              HasSubstr("expected a call of engine::random_ltd(engine)"));
}

TEST(Efficiency, AnEngineThatHasEndedIsNamed) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    std::shared_ptr<Curriculum> lengths;
    Drops drops;
    ResidualNet net;
    {
      ordered_json config = config_of(0, 1);
      config["curriculum_learning"] = {
          {"enabled", true}, {"min_difficulty", 2}, {"max_difficulty", 6}, {"schedule_type", "custom"}};
      const auto parts = start(net.ptr(), config, communicator);
      lengths = curriculum(parts.engine);
      drops = drops_of(parts.engine);
    }
    EXPECT_THROW(lengths->difficulty(), UsageError);
    EXPECT_THROW(net->loss(tokens_of(0, 0), drops), UsageError);
  });
}

TEST(Efficiency, ASectionThatIsOffDoesNotNeedItsEngine) {
  run_ranks(1, [&](comm::Communicator& communicator) {
    std::shared_ptr<Curriculum> lengths;
    Drops drops;
    ResidualNet net;
    {
      const auto parts = start(net.ptr(), small_config(0, 1), communicator);
      lengths = curriculum(parts.engine);
      drops = drops_of(parts.engine);
    }
    EXPECT_EQ(lengths->difficulty(), std::nullopt);
    EXPECT_TRUE(std::isfinite(net->loss(tokens_of(0, 0), drops).item<double>()));
  });
}

}  // namespace
}  // namespace ds::engine
