#include "zero/gather/reuse_rule.h"

#include <gtest/gtest.h>

#include <vector>

namespace ds::zero {
namespace {

void run_pass(ReuseRule& rule, const std::vector<size_t>& order) {
  for (const size_t bucket : order) rule.use(bucket);
  rule.end_pass();
}

TEST(ReuseRule, WithoutAnOrderTheLastTwoUsesStay) {
  ReuseRule rule({10, 10, 10}, 1000);
  for (const size_t bucket : {0, 1, 2}) rule.use(bucket);
  EXPECT_FALSE(rule.following());
  EXPECT_FALSE(rule.stays(0));
  EXPECT_TRUE(rule.stays(1));
  EXPECT_TRUE(rule.stays(2));
  EXPECT_GT(rule.distance(0), rule.distance(1));
}

TEST(ReuseRule, InAnOrderWhatIsUsedAgainWithinTheDistanceStays) {
  ReuseRule rule({10, 20, 40}, 20);
  run_pass(rule, {0, 1, 2, 1, 0});
  rule.expect_update(/*follows=*/true);
  for (const size_t bucket : {0, 1, 2}) rule.use(bucket);
  ASSERT_TRUE(rule.following());
  EXPECT_TRUE(rule.stays(1)) << "comes next";
  EXPECT_TRUE(rule.stays(0)) << "20 elements later";
  EXPECT_FALSE(rule.stays(2)) << "not used again";
}

TEST(ReuseRule, WhatTheNextPassUsesStaysWhereNoUpdateComesBetween) {
  ReuseRule rule({10, 20}, 1000);
  run_pass(rule, {0, 1});
  rule.expect_update(/*follows=*/true);
  run_pass(rule, {0, 1});
  rule.use(0);
  rule.use(1);
  EXPECT_TRUE(rule.stays(0)) << "the end of a pass forgets the update that followed it";
  rule.expect_update(/*follows=*/true);
  EXPECT_FALSE(rule.stays(0));
}

}  // namespace
}  // namespace ds::zero
