// Reading and changing parameters of a running engine, at every stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "core/check.h"
#include "dsengine/engine.h"
#include "tests/model/small_run.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kGatheringRanks = 3;

class GatheredParametersTest : public ::testing::TestWithParam<int> {
 protected:
  static void run(const ordered_json& config, const std::function<void(Engine&, SmallNet&, int)>& body) {
    test::run_ranks(kGatheringRanks, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), config, communicator).engine;
      body(*engine, model, communicator.rank());
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Stages, GatheredParametersTest, ::testing::Range(0, 4),
                         [](const auto& stage) { return cat("stage", stage.param); });

TEST_P(GatheredParametersTest, AreWholeInsideTheScope) {
  run(small_config(GetParam(), 1), [](Engine& engine, SmallNet& model, int) {
    train(engine, model, 2);
    const State expected = copy_of(engine.module_state_dict());
    const auto whole = engine.gathered_parameters({model->first->weight, model->last->bias});
    EXPECT_EQ(model->first->weight.storage().nbytes() > 0, true);
    EXPECT_TRUE(model->first->weight.equal(expected.at("first.weight")));
    EXPECT_TRUE(model->last->bias.equal(expected.at("last.bias")));
  });
}

TEST_P(GatheredParametersTest, ChangesOfTheModifierRankReachAllRanksAndTheOptimizer) {
  // The same change in plain torch, between two steps.
  SmallNet reference;
  torch::optim::AdamW adamw(reference->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  const TorchRun torch_run{.world = kGatheringRanks, .steps = 1};
  torch_run.train(reference, adamw);
  {
    const torch::NoGradGuard no_grad;
    reference->last->weight.mul_(0.5).add_(1.0);
  }
  const State expected = torch_run.train(reference, adamw);

  run(small_config(GetParam(), 1), [&](Engine& engine, SmallNet& model, int rank) {
    train(engine, model, 1);
    {
      const auto whole = engine.gathered_parameters({model->last->weight}, /*modifier_rank=*/1);
      const torch::NoGradGuard no_grad;
      if (rank == 1) model->last->weight.mul_(0.5).add_(1.0);
      if (rank == 2) model->last->weight.fill_(77.0);  // lost
    }
    EXPECT_LT(largest_difference(train(engine, model, 1), expected), 2e-5);
  });
}

TEST_P(GatheredParametersTest, UnchangedElementsKeepTheirMasterWeights) {
  ordered_json config = small_config(GetParam(), 1);
  config["bf16"]["enabled"] = true;
  run(config, [](Engine& engine, SmallNet& model, int rank) {
    const State before = train(engine, model, 2);
    {
      const auto whole = engine.gathered_parameters({model->first->weight}, /*modifier_rank=*/0);
      const torch::NoGradGuard no_grad;
      if (rank == 0) model->first->weight.select(0, 1).fill_(3.0);
    }
    State after = copy_of(engine.fp32_state_dict());
    EXPECT_TRUE(after.at("first.weight").select(0, 1).equal(torch::full({6}, 3.0)));
    after.at("first.weight").select(0, 1).copy_(before.at("first.weight").select(0, 1));
    EXPECT_EQ(largest_difference(after, before), 0.0);
  });
}

TEST_P(GatheredParametersTest, AChangeWithoutModifierRankIsAnError) {
  run(small_config(GetParam(), 1), [](Engine& engine, SmallNet& model, int) {
    auto whole = engine.gathered_parameters({model->first->weight});
    {
      const torch::NoGradGuard no_grad;
      model->first->weight.zero_();
    }
    EXPECT_THAT([&] { whole.close(); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("parameter first.weight was changed"),
                                                                        HasSubstr("modifier_rank"))));
  });
}

// .data() has a version counter of its own.
TEST_P(GatheredParametersTest, AChangeThroughDataWithoutModifierRankIsAnErrorToo) {
  run(small_config(GetParam(), 1), [](Engine& engine, SmallNet& model, int) {
    auto whole = engine.gathered_parameters({model->first->weight, model->last->weight});
    model->last->weight.data().clone().zero_();
    model->last->weight.data().slice(0, 1).clamp_(-0.1, 0.1);
    EXPECT_THAT([&] { whole.close(); }, ThrowsMessage<UsageError>(AllOf(HasSubstr("parameter last.weight was changed"),
                                                                        HasSubstr("modifier_rank"))));
  });
}

TEST_P(GatheredParametersTest, AChangeThroughDataByTheModifierRankIsKept) {
  run(small_config(GetParam(), 1), [](Engine& engine, SmallNet& model, int rank) {
    const at::Tensor expected = copy_of(engine.fp32_state_dict()).at("last.weight").clamp(-0.1, 0.1);
    {
      const auto whole = engine.gathered_parameters({model->last->weight}, /*modifier_rank=*/1);
      if (rank == 1) model->last->weight.data().clamp_(-0.1, 0.1);
    }
    EXPECT_TRUE(copy_of(engine.fp32_state_dict()).at("last.weight").equal(expected));
    EXPECT_TRUE(copy_of(engine.module_state_dict()).at("last.weight").equal(expected));
  });
}

TEST_P(GatheredParametersTest, AChangeThroughDataThatAllRanksMakeIsKeptOutsideOfAScopeToo) {
  run(small_config(GetParam(), 1), [](Engine& engine, SmallNet& model, int rank) {
    train(engine, model, 1);
    State expected = copy_of(engine.fp32_state_dict());
    for (auto& [name, value] : expected) value.clamp_(-0.1, 0.1);
    for (const at::Tensor& parameter : model->parameters()) parameter.data().clamp_(-0.1, 0.1);
    EXPECT_EQ(largest_difference(copy_of(engine.fp32_state_dict()), expected), 0.0);
    engine.backward(model->loss(sample(1, rank)));
    engine.step();
  });
}

TEST_P(GatheredParametersTest, FrozenParametersCanBeChanged) {
  test::run_ranks(kGatheringRanks, [&](comm::Communicator& communicator) {
    SmallNet model;
    model->first->weight.set_requires_grad(false);
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    {
      const auto whole = engine->gathered_parameters({model->first->weight}, /*modifier_rank=*/2);
      if (communicator.rank() == 2) model->first->weight.fill_(0.25);
    }
    EXPECT_TRUE(copy_of(engine->module_state_dict()).at("first.weight").equal(torch::full({11, 6}, 0.25)));
  });
}

TEST_P(GatheredParametersTest, ScopesNestAndTrainingGoesOnInside) {
  const State expected = TorchRun{.world = kGatheringRanks, .steps = 2}.train_adamw();
  run(small_config(GetParam(), 1), [&](Engine& engine, SmallNet& model, int rank) {
    for (int64_t step = 0; step < 2; ++step) {
      {
        const auto outer = engine.gathered_parameters({model->first->weight});
        const auto inner = engine.gathered_parameters({model->first->weight, model->norm->weight});
        engine.backward(model->loss(sample(step, rank)));
        EXPECT_THAT([&] { engine.step(); }, ThrowsMessage<UsageError>(HasSubstr("2 scopes of gathered_parameters()")));
      }
      engine.step();
    }
    EXPECT_LT(largest_difference(copy_of(engine.fp32_state_dict()), expected), 2e-5);
  });
}

TEST_P(GatheredParametersTest, AnExceptionOnAllRanksLeavesTheEngineUsable) {
  const State expected = TorchRun{.world = kGatheringRanks, .steps = 2}.train_adamw();
  run(small_config(GetParam(), 1), [&](Engine& engine, SmallNet& model, int) {
    try {
      const auto whole = engine.gathered_parameters({model->first->weight}, /*modifier_rank=*/0);
      const torch::NoGradGuard no_grad;
      model->first->weight.fill_(5.0);
      throw std::runtime_error("of the program");
    } catch (const std::runtime_error&) {
    }
    EXPECT_LT(largest_difference(train(engine, model, 2), expected), 2e-5);
  });
}

TEST_P(GatheredParametersTest, AModifierInsideAReadOnlyScopeIsAnErrorOnEveryRank) {
  run(small_config(GetParam(), 1), [&](Engine& engine, SmallNet& model, int) {
    const auto outer = engine.gathered_parameters({model->first->weight});
    EXPECT_THAT([&] { auto inner = engine.gathered_parameters({model->first->weight}, 0); },
                ThrowsMessage<UsageError>(HasSubstr("cannot be opened inside one without")));
  });
}

TEST(GatheredParameters, AForeignTensorIsAnError) {
  test::run_ranks(2, [](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    EXPECT_THAT([&] { auto scope = engine->gathered_parameters({torch::ones({2})}); },
                ThrowsMessage<UsageError>(HasSubstr("1 of 1 tensors are no parameters")));
    EXPECT_THAT([&] { auto scope = engine->gathered_parameters({}, 2); },
                ThrowsMessage<UsageError>(HasSubstr("expected a rank from 0 to 1, found 2")));
  });
}

}  // namespace
}  // namespace ds::engine
