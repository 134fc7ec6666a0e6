#include "pipeline/schedule/stage_partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "core/check.h"

namespace ds::pipeline {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(StagePartition, UniformGivesTheFirstStagesOneMore) {
  EXPECT_THAT(partition_uniform(8, 4), ElementsAre(0, 2, 4, 6, 8));
  EXPECT_THAT(partition_uniform(10, 4), ElementsAre(0, 3, 6, 8, 10));
  EXPECT_THAT(partition_uniform(3, 1), ElementsAre(0, 3));
  EXPECT_THAT([] { partition_uniform(3, 4); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("3 layers for 4 stages"), HasSubstr("pipeline.stages"))));
}

TEST(StagePartition, BalancedMakesTheHeaviestStageAsLightAsCanBe) {
  EXPECT_THAT(partition_balanced({1, 1, 1, 1, 1, 1}, 3), ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(partition_balanced({9, 1, 1, 1, 1, 5}, 2), ElementsAre(0, 1, 6));
  // 10 is the heaviest stage in any case; the rest is spread.
  EXPECT_THAT(partition_balanced({10, 2, 2, 2, 2}, 3), ElementsAre(0, 1, 3, 5));
  // Layers without weights still make stages.
  EXPECT_THAT(partition_balanced({0, 0, 0}, 3), ElementsAre(0, 1, 2, 3));
}

// Against all partitions of small cases.
TEST(StagePartition, BalancedIsTheBestOfAllPartitions) {
  unsigned state = 7;
  for (int round = 0; round < 200; ++round) {
    std::vector<double> weights;
    for (int i = 0; i < 8; ++i) weights.push_back(static_cast<double>((state = state * 1103515245 + 12345) >> 16 & 15));
    const auto heaviest = [&](const StageBounds& bounds) {
      double worst = 0;
      for (size_t s = 0; s + 1 < bounds.size(); ++s) {
        double sum = 0;
        for (int i = bounds[s]; i < bounds[s + 1]; ++i) sum += weights[static_cast<size_t>(i)];
        worst = std::max(worst, sum);
      }
      return worst;
    };
    double best = std::numeric_limits<double>::infinity();
    for (int a = 1; a < 7; ++a) {
      for (int b = a + 1; b < 8; ++b) best = std::min(best, heaviest({0, a, b, 8}));
    }
    const StageBounds found = partition_balanced(weights, 3);
    ASSERT_EQ(found.size(), 4U);
    EXPECT_EQ(heaviest(found), best);
    EXPECT_TRUE(std::adjacent_find(found.begin(), found.end(), std::greater_equal<>()) == found.end());
  }
}

TEST(StagePartition, TypesAreFoundRegardlessOfCase) {
  EXPECT_THAT(weights_of_type({"Embedding", "gpt::Block", "gpt::Block", "Linear"}, "block|linear"),
              ElementsAre(0, 1, 1, 1));
  EXPECT_THAT(
      [] {
        weights_of_type({"Block", "Linear"}, "attention");
      },
      ThrowsMessage<ConfigError>(AllOf(HasSubstr("type:attention"), HasSubstr("Block, Linear"))));
  EXPECT_THAT([] { weights_of_type({"Block"}, "(("); }, ThrowsMessage<ConfigError>(HasSubstr("regular expression")));
}

}  // namespace
}  // namespace ds::pipeline
