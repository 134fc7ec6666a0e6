// What a program does to a model that is split over a tensor axis: freezing, reading gradients, keeping it longer than
// its engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <utility>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "dsengine/activation_checkpoint.h"
#include "model/state/tensor_parts.h"
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

// Plain torch, with a parameter that is trained in the first and the last of three steps alone. Norms and values.
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
      EXPECT_EQ(leaf_of(named(*net, kFrozen)).requires_grad(), step != 1);
      EXPECT_NEAR(engine->get_global_grad_norm().value_or(-1), expected[step].first, 1e-4) << step;
      const at::Tensor found = engine->safe_get_full_fp32_param(named(*net, kFrozen));
      const double difference = (found - expected[step].second).abs().max().item<double>();
      // Plain AdamW counts the steps of each parameter, the engine's those of all.
      EXPECT_LT(difference, step == 2 ? 1e-3 : 1e-5) << step;
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
    change(*net, "h.0.ln1.weight", world.rank() % 2 == 0 ? 0.0 : 1e-6);  // too little for the loss to tell
    const char* const told = "ranks 0 and 1 of one tensor axis have changed or frozen parameters in different ways";
    EXPECT_THAT([&] { one_step(*engine, *net, run, 1); },
                ThrowsMessage<UsageError>(HasSubstr(world.rank() < 2 ? told : "ranks 2 and 3 of one tensor axis")));
    EXPECT_THAT([&] { engine->save_checkpoint("unused"); }, ThrowsMessage<UsageError>(HasSubstr("mixture")));
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

TEST(TensorParallelModel, WhatIsComputedAgainUsesUpNothingOfTheNextBatch) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const auto step = [&](int data_rank) {
      const GptBatch batch = gpt_batch(0, data_rank, run.model);
      const auto all = [&](const at::Tensor& one) {  // reads more integers than are looked at
        at::Tensor sum = one;
        for (int i = 0; i < 40; ++i) sum = sum + net->forward(batch.tokens, batch.targets);
        return sum;
      };
      const at::Tensor loss = recompute::checkpoint(all, torch::ones({1}, torch::requires_grad()));
      engine->backward(loss / 40.0);
      engine->step();
    };
    step(0);
    EXPECT_THAT([&] { step(world.rank()); }, ThrowsMessage<UsageError>(HasSubstr("got different batches")));
    step(0);
  });
}

TEST(TensorParallelData, NumbersThatOperatorsMadeMayDifferInTheirLastBits) {
  const auto digest = [](const at::Tensor& tensor) {
    TensorParts parts;
    parts.note_data(tensor);
    return parts.take_data_digest().of_host;
  };
  const at::Tensor mask = at::arange(36, at::kFloat);
  EXPECT_EQ(digest(mask), digest(mask * (1 + 1e-6)));
  EXPECT_NE(digest(mask), digest(mask.view({6, 6})));
  const auto projection = [](const at::Tensor& tensor) {
    TensorParts parts;
    parts.note_data(tensor);
    return parts.take_data_digest().projection.item<double>();
  };
  EXPECT_NEAR(projection(mask), projection(mask * (1 + 1e-6)), 1e-5);
  for (const at::Tensor& other : {mask.flip(0), mask * 1.01, at::ones({36}), mask.gt(20)}) {
    EXPECT_GT(std::abs(projection(mask) - projection(other)), 2e-3) << "twice what ranks tolerate: " << other;
  }
  EXPECT_NE(projection(mask.gt(17)), projection(mask.lt(18)));
  const at::Tensor tokens = at::arange(6);
  EXPECT_EQ(digest(tokens), digest(tokens.clone()));
  EXPECT_NE(digest(tokens), digest(tokens + (tokens == 3)));
}

// Three pairs of a column and a row layer, of which a call may leave out the second.
struct PairsImpl : torch::nn::Module {
  PairsImpl() {
    for (int i = 0; i < 3; ++i) {
      ups.push_back(register_module(cat("up", i), torch::nn::Linear(8, 13)));
      downs.push_back(register_module(cat("down", i), torch::nn::Linear(13, 8)));
    }
    const torch::NoGradGuard no_grad;
    int64_t index = 0;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(((at::arange(parameter.numel(), at::kFloat) * 0.7 + index++).sin() * 0.4).view_as(parameter));
    }
  }
  at::Tensor loss(int64_t batch, bool all) {
    at::Tensor x = (at::arange(32, at::kFloat) * 1.3 + batch * 17).cos().view({4, 8});
    for (int i = 0; i < 3; ++i) {
      if (all || i != 1) x = x + downs[i](torch::tanh(ups[i](x)));
    }
    return x.pow(2).mean();
  }
  std::vector<torch::nn::Linear> ups, downs;
};
TORCH_MODULE(Pairs);

// 13 entries are parts of 7 and 6, whose buckets end at different parameters.
TEST(TensorParallelModel, ALayerThatOneDataRankLeavesOutWithUnevenParts) {
  Pairs truth;
  torch::optim::SGD optimizer(truth->parameters(), 0.1);
  for (int64_t step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < 2; ++rank) (truth->loss(step * 2 + rank, rank == 0) / 2.0).backward();
    optimizer.step();
  }
  const auto expected = truth->named_parameters();
  for (const int stage : {0, 1, 2}) {
    test::run_ranks(4, [&](comm::Communicator& world) {
      Pairs net;
      const auto engine =
          initialize({.model = net.ptr(),
                      .config = nlohmann::json{{"train_micro_batch_size_per_gpu", 4},
                                               {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.1}}}}},
                                               {"zero_allow_untested_optimizer", true},
                                               {"gradient_clipping", 0.0},
                                               {"zero_optimization", {{"stage", stage}, {"reduce_bucket_size", 50}}},
                                               {"tensor_parallel", {{"autotp_size", 2}}},
                                               {"log_level", "error"}},
                      .split = {{"up.", parallel::Style::kColumn}, {"down.", parallel::Style::kRow}},
                      .communicator = {std::shared_ptr<void>(), &world},
                      .seed_generators = false})
              .engine;
      const int rank = engine->communicator().rank();
      for (int64_t step = 0; step < 3; ++step) {
        engine->backward(net->loss(step * 2 + rank, rank == 0));
        engine->step();
      }
      for (const auto& item : net->named_parameters()) {
        const at::Tensor found = engine->safe_get_full_fp32_param(item.value());
        EXPECT_LT((found - expected[item.key()]).abs().max().item<double>(), 1e-5) << item.key() << stage;
      }
    });
  }
}

}  // namespace
}  // namespace ds::engine
