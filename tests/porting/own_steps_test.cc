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

// It computes the loss anew inside of its step.
TEST(OptimizersWithAClosure, AreRefusedAtOnce) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    nlohmann::ordered_json config = small_config(0, 1);
    config.erase("optimizer");
    const auto optimizer = std::make_shared<torch::optim::LBFGS>(model->parameters());
    const auto begin = [&] {
      initialize(
          {.model = model.ptr(), .config = config, .optimizer = optimizer, .communicator = borrowed(communicator)});
    };
    EXPECT_THAT(begin, ThrowsMessage<UsageError>(AllOf(HasSubstr("LBFGS"), HasSubstr("closure"))));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, OwnAccumulation, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
