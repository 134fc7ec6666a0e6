// What a program does to a model that is split over a tensor axis: freezing, reading gradients, keeping it longer than
// its engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "core/check.h"
#include "core/split_tensor.h"
#include "tests/engine/tensor_parallel/split_training.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr const char* kFrozen = "h.0.mlp.fc.weight";

at::Tensor named(torch::nn::Module& net, const std::string& name) { return net.named_parameters()[name]; }

void one_step(Engine& engine, gpt::Gpt& net, const GptRun& run, int64_t number) {
  const GptBatch batch = gpt_batch(number, engine.communicator().rank(), run.model);
  engine.backward(net.forward(batch.tokens, batch.targets));
  engine.step();
}

// Plain torch, with a parameter that is trained in the first and the last of three steps alone.
std::vector<std::pair<double, at::Tensor>> frozen_in_the_middle(const GptRun& run) {
  const auto net = run.make();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(2e-3).weight_decay(0.01));
  std::vector<std::pair<double, at::Tensor>> result;
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    named(*net, kFrozen).set_requires_grad(step != 1);
    for (int rank = 0; rank < run.data; ++rank) {
      const GptBatch batch = gpt_batch(step, rank, run.model);
      (net->forward(batch.tokens, batch.targets) / static_cast<double>(run.data)).backward();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
    result.emplace_back(norm, named(*net, kFrozen).detach().clone());
  }
  return result;
}

class TensorParallelChanges : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Stages, TensorParallelChanges, ::testing::Values(0, 2, 3),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(TensorParallelChanges, AFrozenSplitParameterStaysAndGivesNothingToTheNorm) {
  const GptRun run{.tensor = 2, .data = 2, .stage = GetParam()};
  const auto expected = frozen_in_the_middle(run);
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    for (int64_t step = 0; step < 3; ++step) {
      named(*net, kFrozen).set_requires_grad(step != 1);
      one_step(*engine, *net, run, step);
      EXPECT_EQ(named(*net, kFrozen).requires_grad(), step != 1);
      EXPECT_NEAR(engine->get_global_grad_norm().value_or(-1), expected[step].first, 1e-4) << step;
      const at::Tensor found = engine->safe_get_full_fp32_param(named(*net, kFrozen));
      EXPECT_LT((found - expected[step].second).abs().max().item<double>(), 1e-5) << step;
    }
  });
}

TEST_P(TensorParallelChanges, OneThatWasFrozenAtFirstIsNotTrainedLater) {
  const GptRun run{.tensor = 2, .stage = GetParam()};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    named(*net, kFrozen).set_requires_grad(false);
    const auto engine = run.start(world, net).engine;
    one_step(*engine, *net, run, 0);
    named(*net, kFrozen).set_requires_grad(true);
    EXPECT_THAT([&] { one_step(*engine, *net, run, 1); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr(kFrozen), HasSubstr("was frozen when initialize() ran"))));
  });
}

TEST_P(TensorParallelChanges, NoGradientIsReadFromTheModule) {
  const GptRun run{.tensor = 2, .stage = GetParam()};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const GptBatch batch = gpt_batch(0, 0, run.model);
    engine->backward(net->forward(batch.tokens, batch.targets));
    for (const auto& item : net->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_EQ(item.value().grad().sizes(), item.value().sizes()) << item.key();
      EXPECT_ANY_THROW(item.value().grad().sum()) << item.key();
    }
    try {
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
      ADD_FAILURE() << "it would clip by the norm of a part";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("engine->clip_grad_norm_(max_norm)"));
    }
    engine->step();
    for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.mutable_grad().defined());
    one_step(*engine, *net, run, 1);
  });
}

TEST(TensorParallelModel, IsUsedAfterItsEngineHasEnded) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    auto engine = run.start(world, net).engine;
    one_step(*engine, *net, run, 0);
    engine.reset();
    const GptBatch batch = gpt_batch(1, 0, run.model);
    const at::Tensor loss = net->forward(batch.tokens, batch.targets);  // operators tell the axis of their data
    loss.backward();
    const at::Tensor gradient = leaf_of(named(*net, kFrozen)).grad();
    ASSERT_TRUE(gradient.defined());
    EXPECT_GT(gradient.abs().max().item<double>(), 0);
  });
}

// Adds to a parameter, by name.
void change(torch::nn::Module& net, const std::string& name, double by) {
  const torch::NoGradGuard no_grad;
  const at::Tensor parameter = named(net, name);
  (is_split(parameter) ? leaf_of(parameter) : parameter).detach().add_(by);
}

TEST(TensorParallelModel, WholeParametersThatPartAlongTheAxis) {
  const GptRun run{.tensor = 2, .data = 2, .stage = 1};
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    one_step(*engine, *net, run, 0);
    change(*net, "h.0.ln_1.weight", world.rank() % 2 == 0 ? 0.0 : 1e-6);  // too little for the loss to tell
    const char* const told = "ranks 0 and 1 of one tensor axis have changed or frozen parameters in different ways";
    EXPECT_THAT([&] { one_step(*engine, *net, run, 1); },
                ThrowsMessage<UsageError>(HasSubstr(world.rank() < 2 ? told : "ranks 2 and 3 of one tensor axis")));
    EXPECT_THAT([&] { engine->save_checkpoint("unused"); }, ThrowsMessage<UsageError>(HasSubstr("load_checkpoint")));
  });
}

TEST(TensorParallelModel, PartsThatPartBetweenAxesAreAnErrorOfAllRanks) {
  const GptRun run{.tensor = 2, .data = 2, .stage = 1};
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    one_step(*engine, *net, run, 0);
    change(*net, kFrozen, world.rank() == 3 ? 1e-6 : 0.0);  // ranks 0 and 2 have the same part, and the same values
    EXPECT_THAT([&] { one_step(*engine, *net, run, 1); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("have changed or frozen parameters in different ways"),
                                                Not(HasSubstr("of one tensor axis")))));
  });
}
