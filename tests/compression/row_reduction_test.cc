// Reductions of rows against the same sums on plain tensors, and what they send.
#include "compression/row_reduction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/check.h"
#include "tests/compression/reduction_runs.h"

namespace ds::test {
namespace {

using compression::RowBucket;
using compression::RowReduction;

// Matrices of 23 and 9 rows of 7, padded to 16 elements, in 384: no slice of 2, 3 or 4 ranks ends at the end of a row.
constexpr int64_t kTableWidth = 7;
constexpr int64_t kTablesNumel = 384;
RowBucket two_tables() {
  return {.matrices = {{.offset = 0, .rows = 23}, {.offset = 176, .rows = 9}}, .width = kTableWidth};
}

// Few rows, of which ranks share some; rank 1 has none where `idle`.
at::Tensor looked_up(int rank, int64_t step, at::ScalarType dtype, bool idle) {
  const at::Tensor flat = torch::zeros({kTablesNumel}, dtype);
  if (idle && rank == 1) return flat;
  for (const auto& [offset, row] : {std::pair<int64_t, int64_t>{0, 3}, {0, 4 + rank}, {0, 22}, {176, 8 - rank}}) {
    const int64_t at = (row + step) % (offset == 0 ? 23 : 9);
    flat.narrow(0, offset + at * kTableWidth, kTableWidth)
        .copy_(gradient_of(kTableWidth, rank, 100 * step + row, dtype));
  }
  return flat;
}

class Rows : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Rows, AreAddedInFloat32AndRoundedOnce) {
  const auto [world, scatter] = GetParam();
  run_ranks(world, [&, world = world, scatter = scatter](Communicator& communicator) {
    RowReduction reduction(exchange_groups(lent(communicator)), {two_tables()});
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const bool idle : {false, true}) {
        for (int64_t step = 0; step < 9; ++step) {
          at::Tensor sum = torch::zeros({kTablesNumel});
          for (int rank = 0; rank < world; ++rank) sum += looked_up(rank, step, dtype, idle).to(torch::kFloat);
          const at::Tensor own = looked_up(communicator.rank(), step, dtype, idle);
          EXPECT_TRUE(torch::equal(reduce(reduction, communicator, own, scatter), sum.to(dtype))) << dtype << step;
          EXPECT_TRUE(
              torch::equal(reduce(reduction, communicator, own, scatter, ReduceOp::kAvg), (sum / world).to(dtype)))
              << dtype << step;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Rows, ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()));

TEST(RowReduction, NoRowsAnywhereAndNumbersThatAreNotFinite) {
  run_ranks(3, [](Communicator& communicator) {
    RowReduction reduction(exchange_groups(lent(communicator)), {two_tables()});
    for (const bool scatter : {false, true}) {
      EXPECT_TRUE(reduce(reduction, communicator, torch::zeros({kTablesNumel}), scatter).eq(0).all().item<bool>());
      at::Tensor gradient = torch::zeros({kTablesNumel});
      if (communicator.rank() == 1) gradient[5 * kTableWidth + 2] = std::numeric_limits<float>::quiet_NaN();
      if (communicator.rank() == 2) gradient[176 + 8 * kTableWidth] = -std::numeric_limits<float>::infinity();
      const at::Tensor found = reduce(reduction, communicator, gradient, scatter);
      EXPECT_TRUE(found[5 * kTableWidth + 2].isnan().item<bool>());
      EXPECT_TRUE(found[176 + 8 * kTableWidth].isinf().item<bool>());
      EXPECT_EQ(found.isfinite().logical_not().sum().item<int64_t>(), 2);
    }
  });
}

constexpr int64_t kLargeRows = 4096;
constexpr int64_t kLargeWidth = 32;
constexpr int64_t kLargeBytes = kLargeRows * kLargeWidth * 4;

// What rank 0 of 4 sends of a table in which each rank has so many rows, apart from the numbers of rows.
int64_t bytes_sent(int64_t rows, bool scatter) {
  int64_t sent = 0;
  run_ranks(4, [&](Communicator& communicator) {
    const compression::ExchangeGroups groups = exchange_groups(lent(communicator));
    RowReduction reduction(groups, {{.matrices = {{.offset = 0, .rows = kLargeRows}}, .width = kLargeWidth}});
    at::Tensor gradient = torch::zeros({kLargeRows, kLargeWidth});
    // Every rank has rows of all slices, others than the others have.
    for (int64_t i = 0; i < rows; ++i) {
      gradient[(i * (kLargeRows / rows) + communicator.rank()) % kLargeRows].fill_(1 + communicator.rank());
    }
    gradient = gradient.view(-1);
    const at::Tensor output = scatter ? gradient.chunk(4)[static_cast<size_t>(communicator.rank())] : gradient;
    reduction.start(0, output, gradient, ReduceOp::kSum, "gradients").wait();
    if (communicator.rank() == 0) sent = groups.second->counters().total_bytes_sent();
  });
  return sent;
}

TEST(RowReduction, SendsInProportionToRowsAndNeverMoreThanAllOfThem) {
  constexpr int64_t kRow = kLargeWidth * 4 + 4;
  for (const int64_t rows : {16, 64, 256}) {
    EXPECT_EQ(bytes_sent(rows, false), 3 * rows * kRow) << rows;       // to each other rank
    EXPECT_EQ(bytes_sent(rows, true), 3 * (rows / 4) * kRow) << rows;  // each to the rank that owns it
  }
  EXPECT_EQ(bytes_sent(kLargeRows, false), kLargeBytes * 3 / 2);
  EXPECT_EQ(bytes_sent(kLargeRows, true), kLargeBytes * 3 / 4);
}

TEST(RowReduction, OneRankWithAllRowsDecidesForAll) {
  run_ranks(4, [](Communicator& communicator) {
    RowReduction reduction(exchange_groups(lent(communicator)), {two_tables(), {}});
    EXPECT_TRUE(reduction.takes(0));
    EXPECT_FALSE(reduction.takes(1));
    for (const bool scatter : {false, true}) {
      const auto of = [](int rank) {
        at::Tensor gradient = looked_up(rank, 0, at::kFloat, false);
        if (rank == 3) gradient = gradient_of(kTablesNumel, 3, 1);
        for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{161, 176}, {239, kTablesNumel}}) {
          gradient.slice(0, begin, end).zero_();  // padding
        }
        return gradient;
      };
      at::Tensor sum = torch::zeros({kTablesNumel}, torch::kDouble);
      for (int rank = 0; rank < 4; ++rank) sum += of(rank).to(torch::kDouble);
      const at::Tensor found = reduce(reduction, communicator, of(communicator.rank()), scatter);
      EXPECT_TRUE(torch::allclose(found.to(torch::kDouble), sum, 1e-6, 1e-6));
      EXPECT_TRUE(same_on_all_ranks(found, communicator));
    }
  });
}

TEST(RowReduction, RefusesMoreRowsThanItsNumbersHave) {
  run_ranks(1, [](Communicator& communicator) {
    const RowBucket large{.matrices = {{.offset = 0, .rows = int64_t{1} << 31}}, .width = 1};
    EXPECT_THAT([&] { RowReduction(exchange_groups(lent(communicator)), {large}); },
                ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("set sparse_gradients to false")));
  });
}

}  // namespace
}  // namespace ds::test
