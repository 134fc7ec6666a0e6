#include "tools/bench/bandwidth.h"

#include <gmock/gmock.h>

#include "core/check.h"

namespace ds::tool::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

// The table "Summary" of nccl-tests' doc/PERFORMANCE.md, for n = 2, 4 and 8.
TEST(BusFactor, IsThatOfNcclTests) {
  const auto factors = [](Operation operation) {
    return std::vector<double>{bus_factor(operation, 2), bus_factor(operation, 4), bus_factor(operation, 8)};
  };
  EXPECT_THAT(factors(Operation::kAllReduce), ElementsAre(1.0, 1.5, 1.75));
  for (const Operation operation : {Operation::kAllGather, Operation::kReduceScatter, Operation::kAllToAll}) {
    EXPECT_THAT(factors(operation), ElementsAre(0.5, 0.75, 0.875)) << name_of(operation);
  }
  for (const Operation operation : {Operation::kBroadcast, Operation::kReduce, Operation::kSendRecv}) {
    EXPECT_THAT(factors(operation), ElementsAre(1.0, 1.0, 1.0)) << name_of(operation);
  }
}

TEST(AlgorithmBandwidth, IsBytesOverTime) {
  EXPECT_DOUBLE_EQ(algorithm_bandwidth(2'000'000'000, 0.5), 4.0);
  EXPECT_DOUBLE_EQ(algorithm_bandwidth(1, 0), 0.0);
}

// Of all_gather, reduce_scatter and all_to_all nccl-tests prints the whole tensor as size, a rank's part as count.
TEST(AmountOf, CountsAsNcclTests) {
  const Amount whole = amount_of(Operation::kAllReduce, 1024, 4, 4);
  EXPECT_EQ(whole.count, 256);
  EXPECT_EQ(whole.bytes, 1024);
  const Amount part = amount_of(Operation::kAllGather, 1024, 4, 4);
  EXPECT_EQ(part.count, 64);
  EXPECT_EQ(part.bytes, 1024);
  EXPECT_EQ(amount_of(Operation::kReduceScatter, 1024, 4, 3).bytes, 1020);
  EXPECT_EQ(amount_of(Operation::kAllToAll, 4, 4, 8).bytes, 32);  // an element for each rank
  EXPECT_EQ(amount_of(Operation::kBarrier, 1024, 4, 4).bytes, 0);
}

TEST(ParseSize, KnowsUnitsOf1024) {
  EXPECT_EQ(parse_size("8", "--min"), 8);
  EXPECT_EQ(parse_size("1K", "--min"), 1024);
  EXPECT_EQ(parse_size("1e6", "--min"), 1'000'000);
  EXPECT_EQ(parse_size("64M", "--min"), 64 << 20);
  EXPECT_EQ(parse_size("2g", "--min"), int64_t{2} << 30);
  for (const char* wrong : {"", "K", "-1", "0", "1.5M", "1KB", "1 K", "8P", "99999999999999999999", "9000000G"}) {
    EXPECT_THROW(parse_size(wrong, "--min"), ConfigError) << wrong;
  }
}

TEST(SizeSteps, GoUpToTheLargest) {
  EXPECT_THAT(size_steps(1024, 16384, 4), ElementsAre(1024, 4096, 16384));
  EXPECT_THAT(size_steps(1024, 16383, 4), ElementsAre(1024, 4096));
  EXPECT_THAT(size_steps(5, 5, 2), ElementsAre(5));
  EXPECT_THROW(size_steps(2, 1, 2), ConfigError);
  EXPECT_THROW(size_steps(1, 2, 1), ConfigError);
}

TEST(ParseOperations, KnowsEachAndAll) {
  EXPECT_THAT(parse_operations("sendrecv"), ElementsAre(Operation::kSendRecv));
  EXPECT_THAT(parse_operations("all"), SizeIs(kOperationNames.size()));
  EXPECT_THROW(parse_operations("allreduce"), ConfigError);
}

}  // namespace
}  // namespace ds::tool::bench
