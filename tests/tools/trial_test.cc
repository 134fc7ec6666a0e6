#include "tools/bench/trial.h"

#include <gmock/gmock.h>

#include "comm/collective.h"
#include "tests/support/thread_ranks.h"

namespace ds::tool::bench {
namespace {

constexpr int64_t kCount = 1031;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                      at::kChar,  at::kByte,   at::kInt,      at::kLong};

TEST(Trial, FindsNothingWrongInWhatTheCommunicatorDoes) {
  for (const int world : {1, 2, 3}) {
    test::run_ranks(world, [](comm::Communicator& ranks) {
      for (size_t i = 0; i < kOperationNames.size(); ++i) {
        for (const bool in_place : {false, true}) {
          if (!is_offered(static_cast<Operation>(i), in_place)) continue;
          for (const at::ScalarType dtype : kDtypes) {
            for (const auto op : {comm::ReduceOp::kSum, comm::ReduceOp::kMin, comm::ReduceOp::kMax}) {
              Trial trial(ranks, {.operation = static_cast<Operation>(i),
                                  .count = kCount,
                                  .in_place = in_place,
                                  .dtype = dtype,
                                  .reduce_op = op,
                                  .root = ranks.size() - 1});
              EXPECT_EQ(trial.count_wrong(), 0) << kOperationNames[i] << " " << dtype << " " << comm::name_of(op);
            }
          }
        }
      }
    });
  }
}

// Rank 1 is the root and sends zeros.
TEST(Trial, CountsWhatIsWrong) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    if (ranks.rank() == 1) {
      const at::Tensor zeros = at::zeros({kCount});
      ranks.broadcast(zeros, 1).wait();
      return;
    }
    const at::Tensor right = ExpectedValues(at::kFloat, at::kCPU, 2, false).of_rank(1, 0, kCount);
    Trial trial(ranks, {.operation = Operation::kBroadcast, .count = kCount, .in_place = true, .root = 1});
    EXPECT_EQ(trial.count_wrong(), at::count_nonzero(right).item<int64_t>());
  });
}

TEST(Trial, TakesTimeAndStillGivesRightResults) {
  test::run_ranks(2, [](comm::Communicator& ranks) {
    Trial trial(ranks, {.operation = Operation::kAllReduce, .count = kCount, .in_place = true});
    EXPECT_GT(trial.time(1, 3), 0);
    EXPECT_EQ(trial.count_wrong(), 0);
  });
}

TEST(ExpectedValues, SumsAreExactHoweverManyRanks) {
  for (const at::ScalarType dtype : kDtypes) {
    for (const int ranks : {1, 2, 7, 64, 127, 1000}) {
      const ExpectedValues values(dtype, at::kCPU, ranks, true);
      at::Tensor sum = at::zeros({600}, at::kLong);
      for (int rank = 0; rank < ranks; ++rank) sum += values.of_rank(rank, 17, 600).to(at::kLong);
      const at::Tensor expected = values.of_all(comm::ReduceOp::kSum, 17, 600);
      EXPECT_TRUE(sum.equal(expected.to(at::kLong))) << dtype << " " << ranks;
      EXPECT_EQ(at::eq(expected, values.never()).sum().item<int64_t>(), 0) << dtype << " " << ranks;
      EXPECT_GT(sum.max().item<int64_t>(), 0);
    }
  }
}

// A part that lands in another part's place is found.
TEST(ExpectedValues, DifferBetweenPartsAndRanks) {
  const ExpectedValues values(at::kFloat, at::kCPU, 4, false);
  EXPECT_FALSE(values.of_rank(0, 0, 256).equal(values.of_rank(0, 256, 256)));
  EXPECT_FALSE(values.of_rank(0, 0, 256).equal(values.of_rank(1, 0, 256)));
  EXPECT_TRUE(values.of_rank(0, 0, 600).narrow(0, 100, 256).equal(values.of_rank(0, 100, 256)));
}

}  // namespace
}  // namespace ds::tool::bench
