// Ranks of a tensor axis that do not run the same program on the same data are told so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "core/check.h"
#include "core/split/split_tensor.h"
#include "dsengine/optimizer.h"
#include "tests/engine/tensor_parallel/split_training.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(TensorParallelAgreement, AnotherBatchOnOneRankNamesBothAndTheAxis) {
  const GptRun run{.tensor = 2, .data = 2, .stage = 1};
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const auto step = [&](int data_rank) {
      const GptBatch batch = gpt_batch(0, data_rank, run.model);
      engine->backward(net->forward(batch.tokens, batch.targets));
      engine->step();
    };
    step(engine->communicator().rank());
    // Ranks 2 and 3 are the second axis; the first one has done nothing wrong.
    const bool wrong = world.rank() == 3;
    if (world.rank() < 2) {
      EXPECT_THAT([&] { step(0); }, ThrowsMessage<UsageError>(HasSubstr("ranks of another tensor axis")));
    } else {
      EXPECT_THAT([&] { step(wrong ? 7 : 1); },
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 2 and 3 of one tensor axis got different batches"),
                                                  HasSubstr("dp_world_size"))));
    }
    // The state is as it was.
    step(engine->communicator().rank());
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

TEST(TensorParallelAgreement, AnotherLossOnOneRank) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const GptBatch batch = gpt_batch(0, 0, run.model);
    engine->backward(net->forward(batch.tokens, batch.targets) * (world.rank() + 1));
    EXPECT_THAT([&] { engine->step(); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("ranks 0 and 1 of one tensor axis have different losses"))));
  });
}

TEST(TensorParallelAgreement, AnotherRateOnOneRankIsNamedBeforeTheStepIsApplied) {
  const GptRun run{.tensor = 2, .data = 2, .stage = 1};
  test::run_ranks(4, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const auto step = [&] {
      const GptBatch batch = gpt_batch(0, engine->communicator().rank(), run.model);
      engine->backward(net->forward(batch.tokens, batch.targets));
      engine->step();
    };
    step();
    const auto set_rate = [&](double rate) { engine->optimizer()->groups()[0].lr = rate; };
    if (world.rank() == 3) set_rate(0.5);
    if (world.rank() < 2) {
      EXPECT_THAT(step, ThrowsMessage<UsageError>(HasSubstr("ranks of another tensor axis")));
    } else {
      EXPECT_THAT(step,
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("lr of parameter group 0: 0.002 on rank 2, 0.5 on rank 3"),
                                                  HasSubstr("Nothing was applied"))));
    }
    // Both ranks of an axis: the data-parallel ranks of each have two rates.
    if (world.rank() >= 2) set_rate(0.5);
    const int own = world.rank() % 2;
    EXPECT_THAT(step,
                ThrowsMessage<UsageError>(HasSubstr("lr of parameter group 0: 0.002 on rank " + std::to_string(own) +
                                                    ", 0.5 on rank " + std::to_string(own + 2))));
    set_rate(0.002);
    step();
    EXPECT_EQ(engine->global_steps(), 2);
  });
}

TEST(TensorParallelAgreement, OtherRulesOnOneRank) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    auto rules = gpt_rules(run.model);
    if (world.rank() == 1) rules[2].style = parallel::Style::kWhole;
    EXPECT_THAT(
        [&] {
          initialize({.model = run.make(),
                      .config = run.config(),
                      .split = rules,
                      .communicator = {std::shared_ptr<void>(), &world}});
        },
        ThrowsMessage<CommError>(AllOf(HasSubstr("rule 2 of .split"), HasSubstr("rank 1"))));
  });
}

TEST(TensorParallelAgreement, AModelThatIsConvertedAfterwardsNamesTheParameter) {
  const GptRun run{.tensor = 2};
  test::run_ranks(2, [&](comm::Communicator& world) {
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    const GptBatch batch = gpt_batch(0, 0, run.model);
    const at::Tensor loss = net->forward(batch.tokens, batch.targets);
    try {
      net->to(at::kDouble);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): as well
    }
    EXPECT_THAT(
        [&] { engine->backward(loss); },
        ThrowsMessage<UsageError>(AllOf(HasSubstr("wte.weight"), HasSubstr("tensor axis"), HasSubstr("model->to()"))));
  });
}

TEST(TensorParallelAgreement, ASplitModuleIsNotSplitAgain) {
  test::run_ranks(1, [&](comm::Communicator& world) {
    const GptRun run{.tensor = 1};
    const auto net = run.make();
    const auto engine = run.start(world, net).engine;
    EXPECT_TRUE(engine->joined_operators().empty());
    EXPECT_EQ(engine->mp_world_size(), 1);
  });
}

TEST(TensorParallelAgreement, RanksThatDoNotDivide) {
  test::run_ranks(3, [&](comm::Communicator& world) {
    const GptRun run{.tensor = 2};
    EXPECT_THAT([&] { run.start(world, run.make()); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("tensor_parallel"), HasSubstr("found 2"))));
  });
}

}  // namespace
}  // namespace ds::engine
