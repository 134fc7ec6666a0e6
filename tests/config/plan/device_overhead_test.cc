#include "config/plan/device_overhead.h"

#include <gtest/gtest.h>

namespace ds::engine {
namespace {

Plan plan_of(int64_t dp, int64_t pipe = 1) {
  Plan plan;
  plan.topology = {.world_size = dp * pipe, .dp = dp, .pipe = pipe};
  plan.shard_ranks = dp;
  return plan;
}

TEST(DeviceOverhead, OfOneRankIsContextAndWorkspaces) {
  const DeviceOverhead alone = predict_device_overhead(plan_of(1));
  EXPECT_EQ(alone.groups, 0);
  EXPECT_EQ(alone.nccl, 0);
  EXPECT_EQ(alone.total(), kCudaContextBytes + kMultiplyingThreads * kCublasWorkspaceBytes);
}

TEST(DeviceOverhead, CountsTheGroupsOfARank) {
  EXPECT_EQ(predict_device_overhead(plan_of(8)).groups, 1) << "all ranks";
  Plan stage3 = plan_of(8);
  stage3.gather.emplace();
  EXPECT_EQ(predict_device_overhead(stage3).groups, 2) << "and parameters";
  stage3.node_ranks = 4;
  EXPECT_EQ(predict_device_overhead(stage3).groups, 3) << "and the node";
  Plan mics = plan_of(8);
  mics.gather.emplace();
  mics.shard_ranks = 2;
  EXPECT_EQ(predict_device_overhead(mics).groups, 4) << "all ranks, shards, replicas, parameters";
}

TEST(DeviceOverhead, CountsThePairsOfAPipeline) {
  const DeviceOverhead two = predict_device_overhead(plan_of(1, 2));
  EXPECT_EQ(two.groups, 2) << "all ranks, the pipeline";
  EXPECT_EQ(two.pairs, 2);
  const DeviceOverhead four = predict_device_overhead(plan_of(2, 4));
  EXPECT_EQ(four.groups, 3);
  EXPECT_EQ(four.pairs, 4) << "of a rank with two neighbours";
  EXPECT_EQ(four.nccl, 3 * kNcclGroupBytes + 4 * kNcclPairBytes);
}

}  // namespace
}  // namespace ds::engine
