// Ranks whose programs take different ways: named at the next step, at every stage.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "tests/porting/ported_run.h"
#include "tests/support/scratch_folder.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class PartedRanks : public ::testing::TestWithParam<int> {};
class PartedReductions : public ::testing::TestWithParam<int> {};

class Samples : public torch::data::datasets::Dataset<Samples> {
 public:
  torch::data::Example<> get(size_t index) override {
    return {sample(static_cast<int64_t>(index), 0).select(0, 0), torch::zeros({1})};
  }
  torch::optional<size_t> size() const override { return 64; }
};

// As a program that catches an exception of its own and goes on with the next batch.
TEST_P(PartedRanks, ABatchThatOneRankLeavesOutIsNamedAtTheNextStep) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    auto parts = initialize({.model = model.ptr(),
                             .config = small_config(GetParam(), 1),
                             .training_data = Samples(),
                             .communicator = borrowed(communicator)});
    Engine& engine = *parts.engine;
    int64_t batches = 0;
    const auto run = [&] {
      for (const auto& batch : *parts.loader) {
        if (++batches == 3 && communicator.rank() == 1) continue;
        engine.backward(model->loss(batch.data));
        engine.step();
      }
    };
    EXPECT_THAT(run, ThrowsMessage<UsageError>(AllOf(HasSubstr("different numbers of batches"),
                                                     HasSubstr("rank 0: step 3, batch 3 of its loader"),
                                                     HasSubstr("rank 1: step 3, batch 4 of its loader"))));
  });
}

// With data of its own nothing tells a batch that one rank leaves out from any other, until the others have one more.
TEST_P(PartedRanks, ABatchOfItsOwnThatOneRankLeavesOutIsAnErrorAtTheEnd) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto run = [&] {
      for (int batch = 0; batch < 4; ++batch) {
        if (batch == 1 && communicator.rank() == 1) continue;
        engine->backward(model->loss(sample(batch, communicator.rank())));
        engine->step();
      }
    };
    if (communicator.rank() == 1) return run();
    EXPECT_THAT(run, ThrowsMessage<std::exception>(AllOf(HasSubstr("rank 1"), HasSubstr(", step 4)"))));
  });
}

// `if (rank == 0) engine->save_checkpoint(...)`, the usual mistake.
TEST_P(PartedReductions, ASaveOfOneRankAloneIsNamedByItsCall) {
  const test::ScratchFolder folder;
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    const auto step = [&] {
      if (communicator.rank() == 0) engine->save_checkpoint(folder / "checkpoints");
      train(*engine, model, 1);
    };
    EXPECT_THAT(step, ThrowsMessage<std::exception>(HasSubstr("rank 0 is in save_checkpoint(), rank 1 in backward()")));
  });
}

// At stage 3 the ranks then wait in two groups for each other, which the flight watch of processes finds.
TEST_P(PartedReductions, ASecondBackwardOfOneRankIsAnErrorOnAll) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), 1), communicator).engine;
    train(*engine, model, 1);
    const auto step = [&] {
      const int times = 1 + communicator.rank();
      for (int i = 0; i < times; ++i) engine->backward(model->loss(sample(1, communicator.rank())) / times);
      engine->step();
    };
    EXPECT_THAT(step, ThrowsMessage<std::exception>(
                          AllOf(HasSubstr("ranks issued different collectives"), HasSubstr(", step 2)"))));
  });
}

// At stage 3, where the others do not take part in its gathers: no wrong numbers first.
TEST(PartedRanksAtStage3, AForwardOfOneRankAloneThrowsWithTheWayOut) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(3, 1), communicator).engine;
    train(*engine, model, 1);
    const auto forward = [&] {
      const torch::NoGradGuard no_grad;
      if (communicator.rank() == 0) model->forward(sample(0, 0));
      const torch::AutoGradMode grad(true);
      engine->backward(model->loss(sample(1, communicator.rank())));
      engine->step();
    };
    EXPECT_THAT(forward, ThrowsMessage<std::exception>(AllOf(HasSubstr("ranks issued different collectives"),
                                                             HasSubstr("parameters of bucket"))));
  });
}

nlohmann::ordered_json released_always(bool on) {
  nlohmann::ordered_json config = small_config(3, 1);
  config["zero_optimization"] = {{"stage", 3}, {"stage3_release_always", on}};
  return config;
}

// Episodes of a policy end when they end. A small model does not care: it is whole. One that is released, as a large
// one is, does, in the first forward that not all ranks run.
TEST(PartedRanksAtStage3, RolloutsOfDifferentLengthAreNamedWhereTheModelIsReleased) {
  for (const bool released : {false, true}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      SmallNet model;
      const auto engine = start(model.ptr(), released_always(released), communicator).engine;
      train(*engine, model, 2);
      const auto step = [&] {
        {
          const torch::NoGradGuard no_grad;
          for (int i = 0; i < 2 + 2 * communicator.rank(); ++i) model->forward(sample(i, communicator.rank()));
        }
        engine->backward(model->loss(sample(2, communicator.rank())));
        engine->step();
      };
      if (!released) {
        step();
        return;
      }
      EXPECT_THAT(step, ThrowsMessage<std::exception>(
                            AllOf(HasSubstr("ranks issued different collectives"), HasSubstr("rank 0 all_reduce"),
                                  HasSubstr("'start of backward'"), HasSubstr("rank 1 all_gather"),
                                  HasSubstr("'parameters of bucket"), HasSubstr(", step 3)"),
                                  HasSubstr("in a scope of engine->gathered_parameters"))));
    });
  }
}

TEST(PartedRanksAtStage3, AReleasedModelTrainsAsAnyOther) {
  const PortedRun run;
  expect_same(run_on_engine(run, released_always(true)), run_plainly(run));
}

TEST(PartedRanksAtStage3, InAScopeForwardsMayDiffer) {
  const PortedRun run;
  const PortedResult expected = run_plainly(run);
  const auto rollouts = [](Engine& engine, SmallNet& model) {
    const auto whole = engine.gathered_parameters(model->parameters());
    const torch::NoGradGuard no_grad;
    for (int i = 0; i <= 3 * engine.global_rank(); ++i) model->forward(sample(i, 0));
  };
  expect_same(run_on_engine(run, small_config(3, 1), rollouts), expected);
}

INSTANTIATE_TEST_SUITE_P(Stages, PartedRanks, ::testing::Values(0, 1, 2, 3), stage_name);
INSTANTIATE_TEST_SUITE_P(Stages, PartedReductions, ::testing::Values(0, 1, 2), stage_name);

}  // namespace
}  // namespace ds::engine
