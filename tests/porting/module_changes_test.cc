// Parameters that are frozen, unfrozen, added or removed after initialize().
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "core/check.h"
#include "tests/porting/ported_run.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class ModuleChanges : public ::testing::TestWithParam<int> {};

// As with torch's optimizers, which leave out what has no gradient.
TEST_P(ModuleChanges, WhatIsFrozenMidwayDoesNotMove) {
  const PortedRun run{.steps = 8, .change = [](SmallNet& model) {
                        for (at::Tensor& parameter : model->first->parameters()) parameter.set_requires_grad(false);
                      }};
  expect_same(run_on_engine(run, small_config(GetParam(), 1)), run_plainly(run));
}

TEST_P(ModuleChanges, WhatIsFrozenMidwayDoesNotMoveInBf16) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), with_bf16(small_config(GetParam(), 1)), communicator).engine;
    const State before = train(*engine, model, 3);
    model->first->weight.set_requires_grad(false);
    const State after = train(*engine, model, 3);
    EXPECT_TRUE(after.at("first.weight").equal(before.at("first.weight")));
    EXPECT_FALSE(after.at("first.bias").equal(before.at("first.bias")));
    model->first->weight.set_requires_grad(true);
    EXPECT_FALSE(train(*engine, model, 1).at("first.weight").equal(before.at("first.weight")));
  });
}

TEST_P(ModuleChanges, FrozenByOneRankEndsTheStepOfAll) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    if (communicator.rank() == 1) model->first->bias.set_requires_grad(false);
    engine->backward(model->loss(sample(1, communicator.rank())));
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("changed or frozen parameters in different ways"),
                                                HasSubstr("rank 1: step 2, with frozen parameters"))));
  });
}

TEST_P(ModuleChanges, WhatWasFrozenAtTheStartCannotBeTrainedLater) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    model->first->weight.set_requires_grad(false);
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    model->first->weight.set_requires_grad(true);
    EXPECT_THAT(
        [&] { engine->backward(model->loss(sample(1, communicator.rank()))); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("parameter first.weight"), HasSubstr("frozen when initialize()"))));
    model->first->weight.set_requires_grad(false);
    engine->backward(model->loss(sample(1, communicator.rank())));
    engine->step();
  });
}

struct GrowingNetImpl : SmallNetImpl {
  at::Tensor loss(const at::Tensor& x) {
    const at::Tensor base = SmallNetImpl::loss(x);
    return extra.defined() ? base * extra : base;
  }
  at::Tensor extra;
};

TEST_P(ModuleChanges, AParameterRegisteredLaterIsAnErrorWithItsName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    const auto model = std::make_shared<GrowingNetImpl>();
    const auto engine = start(model, small_config(GetParam(), 1), communicator).engine;
    engine->backward(model->loss(sample(0, communicator.rank())));
    engine->step();
    model->extra = model->register_parameter("extra", torch::ones({}));
    engine->backward(model->loss(sample(0, communicator.rank())));
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("parameter extra"), HasSubstr("after initialize()"))));
  });
}

TEST_P(ModuleChanges, AModuleThatWasReplacedIsAnErrorWithTheNameOfWhatIsGone) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    model->last = model->replace_module("last", torch::nn::Linear(11, 3));
    engine->backward(model->loss(sample(1, communicator.rank())));
    EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<UsageError>(HasSubstr("last.weight")));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ModuleChanges, ::testing::Values(0, 1, 2, 3), stage_name);

}  // namespace
}  // namespace ds::engine
