// Modules that fully_shard gets from elsewhere: built in parts, split already.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "core/check.h"
#include "dsengine/fully_shard.h"
#include "dsengine/parallel.h"
#include "dsengine/zero.h"
#include "tests/loops/block_net.h"
#include "tests/support/thread_ranks.h"

namespace ds {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kSourceSteps = 5;

void expect_trains_as_torch(test::BlockNet& model, FullyShardOptions options, int rank, bool units) {
  const test::MakeOptimizer make = test::optimizers()[2].second;
  if (units) {
    for (test::Block& block : model->blocks) fully_shard(block, options);
  }
  const auto sharded = fully_shard(model, options);
  const auto optimizer = make(sharded->parameters());
  test::train(model, *optimizer, rank, kSourceSteps);
  EXPECT_LT(test::largest_difference(sharded->full_state_dict(), test::train_plain(2, kSourceSteps, make)), 5e-6);
}

TEST(ModuleSources, BuiltInPartsByZeroInit) {
  for (const bool units : {false, true}) {
    test::run_ranks(2, [&](comm::Communicator& communicator) {
      zero::Init init(test::borrowed(communicator), {.max_live = 100, .smallest = 8});
      test::BlockNet model;
      EXPECT_GT(init.held_bytes(), 0);
      expect_trains_as_torch(model, {.process_group = test::borrowed(communicator), .init = &init}, communicator.rank(),
                             units);
      EXPECT_EQ(init.held_bytes(), 0);
    });
  }
}

TEST(ModuleSources, SplitAlreadyIsRefusedByName) {
  test::run_ranks(2, [&](comm::Communicator& communicator) {
    test::BlockNet model;
    const auto group = test::borrowed(communicator);
    const auto split = parallel::parallelize_module(*model, group, {{.pattern = ".*up"}});
    EXPECT_THAT([&] { fully_shard(model, {.process_group = group}); },
                ThrowsMessage<UsageError>(AllOf(HasSubstr("block0.up.weight"), HasSubstr("split over ranks already"))));
  });
}

}  // namespace
}  // namespace ds
