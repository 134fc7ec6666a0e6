// Programs whose steps are others than the engine's: they accumulate by themselves, or compute the loss inside.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ThrowsMessage;

constexpr int kOwnMicroBatches = 2;

// Two backward() for each step(), `steps` times; the weights, and what was logged.
std::pair<State, std::string> accumulate(int stage, int accumulation, int steps, double divisor) {
  State weights;
  ::testing::internal::CaptureStderr();
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(stage, accumulation), communicator).engine;
    for (int micro = 0; micro < steps * kOwnMicroBatches; ++micro) {
      engine->backward(model->loss(sample(micro, communicator.rank())) / divisor);
      if (micro % kOwnMicroBatches == kOwnMicroBatches - 1) engine->step();
    }
    const State own = copy_of(engine->fp32_state_dict());
    if (communicator.rank() == 0) weights = own;
  });
  return {weights, ::testing::internal::GetCapturedStderr()};
}

class OwnAccumulation : public ::testing::TestWithParam<int> {};

const auto kIsTold =
    AllOf(HasSubstr("2 backward() calls came before it"), HasSubstr("sets gradient_accumulation_steps to 1"));

TEST_P(OwnAccumulation, IsThatOfTorchWhereTheConfigHasNone) {
  const auto [weights, log] = accumulate(GetParam(), 1, 4, kOwnMicroBatches);
  const State expected = TorchRun{.world = 2, .accumulation = kOwnMicroBatches, .steps = 4}.train_adamw();
  EXPECT_LT(largest_difference(weights, expected), 2e-6);
  EXPECT_THAT(log, Not(kIsTold));
}

TEST_P(OwnAccumulation, BesideThatOfTheConfigIsToldThatUpdatesComeLate) {
  EXPECT_THAT(accumulate(GetParam(), kOwnMicroBatches, 4, 1).second, kIsTold);
}

// They compute the loss anew inside of their step.
std::shared_ptr<torch::optim::LBFGS> lbfgs_of(const SmallNet& model, bool searches) {
  torch::optim::LBFGSOptions options(searches ? 1.0 : 0.05);
  options.max_iter(4).history_size(5);
  if (searches) options.line_search_fn("strong_wolfe");
  return std::make_shared<torch::optim::LBFGS>(model->parameters(), options);
}

Initialized start_lbfgs(const SmallNet& model, const std::shared_ptr<torch::optim::Optimizer>& optimizer,
                        comm::Communicator& communicator, double clipping = 0.0) {
  nlohmann::ordered_json config = small_config(0, 1);
  config.erase("optimizer");
  config["gradient_clipping"] = clipping;
  return initialize(
      {.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(communicator)});
}

TEST(OptimizersWithAClosure, AgreeWithAPlainLoop) {
  for (const bool searches : {false, true}) {
    for (const int world : {1, 2}) {
      SmallNet plain;
      const auto optimizer = lbfgs_of(plain, searches);
      std::vector<double> expected;
      for (int64_t step = 0; step < 10; ++step) {
        const auto closure = [&] {
          optimizer->zero_grad();
          at::Tensor loss = torch::zeros({});
          for (int rank = 0; rank < world; ++rank) loss = loss + plain->loss(sample(step % 2, rank)) / world;
          loss.backward();
          return loss;
        };
        expected.push_back(optimizer->step(closure).item<double>());
      }
      EXPECT_LT(expected.back(), expected.front());
      test::run_ranks(world, [&](comm::Communicator& communicator) {
        SmallNet model;
        const auto own = lbfgs_of(model, searches);
        const auto engine = start_lbfgs(model, own, communicator).engine;
        for (int64_t step = 0; step < 10; ++step) {
          const at::Tensor loss = engine->step([&] {
            own->zero_grad();
            at::Tensor found = model->loss(sample(step % 2, communicator.rank()));
            engine->backward(found);
            return found;
          });
          EXPECT_NEAR(loss.item<double>(), expected[static_cast<size_t>(step)], 2e-5)
              << step << " searches " << searches;
        }
        EXPECT_EQ(engine->global_steps(), 10);
        EXPECT_LT(largest_difference(parameters_of(*model), parameters_of(*plain)), 1e-4);
      });
    }
  }
}

TEST(OptimizersWithAClosure, AreToldWhatTheyNeed) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model, other, third;
    const auto engine = start_lbfgs(model, lbfgs_of(model, false), communicator).engine;
    const auto loss = [&] { return model->loss(sample(0, communicator.rank())); };
    const auto closure = [&] {
      at::Tensor found = loss();
      engine->backward(found);
      return found;
    };
    const State before = parameters_of(*model);
    engine->backward(loss());
    EXPECT_THAT([&] { engine->step(closure); }, ThrowsMessage<UsageError>(HasSubstr("no engine->backward() before")));
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("LBFGS"), HasSubstr("closure"))));
    engine->zero_grad();
    EXPECT_THAT([&] { engine->step(loss); }, ThrowsMessage<UsageError>(HasSubstr("the closure calls")));
    EXPECT_EQ(largest_difference(parameters_of(*model), before), 0.0);
    engine->step(closure);
    EXPECT_GT(largest_difference(parameters_of(*model), before), 0.0);
    const auto clipping = start_lbfgs(other, lbfgs_of(other, false), communicator, 1.0).engine;
    EXPECT_THAT([&] { clipping->step(closure); }, ThrowsMessage<UsageError>(HasSubstr("gradient_clipping")));
    const auto configured = start(third.ptr(), small_config(0, 1), communicator).engine;
    EXPECT_THAT([&] { configured->step(closure); }, ThrowsMessage<UsageError>(HasSubstr("AdamW")));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, OwnAccumulation, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
