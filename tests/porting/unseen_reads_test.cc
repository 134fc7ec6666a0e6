// Memory that is read where the engine sees no operator: parameters that are on their way after a step, and gradients
// inside of an accumulation. The value or an error, never one of before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class ArrivingParameters : public ::testing::TestWithParam<int> {};

TEST_P(ArrivingParameters, AreReadByOperatorsAloneUntilTheyAreHere) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto step = [&] {
      engine->backward(model->loss(sample(0, communicator.rank())));
      engine->step();
    };
    const auto says = [](const std::string& name) {
      return ThrowsMessage<c10::Error>(
          AllOf(HasSubstr("parameter " + name), HasSubstr("on its way"), HasSubstr("synchronize_parameters()")));
    };
    step();
    EXPECT_THAT([&] { model->last->weight.data_ptr<float>(); }, says("first.weight"));
    EXPECT_THAT([&] { (model->last->weight.accessor<float, 2>()); }, says("first.weight"));
    std::ostringstream stream;
    EXPECT_THAT([&] { torch::save(model, stream); }, says("first.weight"));
    const at::Tensor alias = model->last->weight.data();  // made of what is on its way
    EXPECT_TRUE(alias.equal(model->last->weight));
    step();
    engine->synchronize_parameters();
    EXPECT_EQ(model->last->weight.data_ptr<float>()[0], model->last->weight[0][0].item<float>());
    EXPECT_EQ(alias.data_ptr<float>(), model->last->weight.data_ptr<float>());
    std::stringstream whole;
    torch::save(model, whole);
    SmallNet other;
    torch::load(other, whole);
    EXPECT_EQ(largest_difference(parameters_of(*other), copy_of(engine->module_state_dict())), 0.0);
  });
}

// Of an actor, say, that plays while the engine's thread trains.
TEST_P(ArrivingParameters, AreNotReadByOperatorsOfAnotherThread) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    const auto acted = [&] {
      at::Tensor result;
      std::exception_ptr error;
      std::thread actor([&] {
        try {
          const torch::NoGradGuard no_grad;
          result = model->forward(sample(3, 0));
        } catch (...) {
          error = std::current_exception();
        }
      });
      actor.join();
      if (error) std::rethrow_exception(error);
      return result;
    };
    EXPECT_THAT(acted, ThrowsMessage<c10::Error>(HasSubstr("on its way")));
    engine->synchronize_parameters();
    EXPECT_TRUE(acted().equal(model->forward(sample(3, 0))));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ArrivingParameters, ::testing::Values(1, 2), stage_name);

class RunningAccumulation : public ::testing::TestWithParam<int> {};

TEST_P(RunningAccumulation, ShowsNoGradients) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 2), communicator).engine;
    const auto first_pass = [&] {
      engine->backward(model->loss(sample(0, communicator.rank())));
      engine->step();
    };
    first_pass();
    for (const std::function<void()>& touch :
         {std::function<void()>([&] { model->first->weight.grad().norm(); }),
          std::function<void()>([&] { model->first->weight.mutable_grad().zero_(); }),
          std::function<void()>([&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0); })}) {
      EXPECT_THAT(touch, ThrowsMessage<c10::Error>(HasSubstr("the accumulation goes on")));
    }
    model->zero_grad();  // torch would drop what was accumulated
    EXPECT_THAT([&] { engine->backward(model->loss(sample(1, communicator.rank()))); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("backward(): the gradient of parameter first.weight"),
                                                HasSubstr("taken away"), HasSubstr("engine->zero_grad()"))));
    engine->zero_grad();
    const State weights = train(*engine, model, 4);
    EXPECT_LT(largest_difference(weights, TorchRun{.world = 2, .accumulation = 2, .steps = 4}.train_adamw()), 2e-6);
  });
}

TEST_P(RunningAccumulation, EndsWithGradientsThatAreTheProgramsToReplaceByNothing) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto backward = [&] { engine->backward(model->loss(sample(0, communicator.rank()))); };
    backward();
    model->norm->bias.mutable_grad().set_data(torch::ones({11}));
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("norm.bias was replaced")));
    engine->zero_grad();
    torch::optim::SGD optimizer(model->parameters(), 0.1);  // whose zero_grad() detaches first
    backward();
    optimizer.zero_grad();
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("first.weight was taken away")));
    engine->zero_grad();
    backward();
    engine->step();
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, RunningAccumulation, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
