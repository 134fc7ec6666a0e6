#include "zero/gather/reuse_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ds::zero {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

void run_pass(UseTrace& trace, const std::vector<size_t>& uses) {
  for (const size_t bucket : uses) trace.use(bucket);
  trace.end_pass();
}

TEST(UseTrace, ExpectsWhatTheLastPassDid) {
  UseTrace trace({10, 20, 30});
  EXPECT_FALSE(trace.following());
  EXPECT_THAT(trace.upcoming(), IsEmpty());
  run_pass(trace, {0, 1, 2, 1, 0});
  EXPECT_TRUE(trace.following());
  EXPECT_THAT(trace.upcoming(), ElementsAre(0, 1, 2, 1, 0));
  trace.use(0);
  trace.use(1);
  EXPECT_THAT(trace.upcoming(), ElementsAre(2, 1, 0));
}

TEST(UseTrace, DistanceCountsTheElementsUsedBefore) {
  UseTrace trace({10, 20, 30});
  run_pass(trace, {0, 1, 2, 1, 0});
  EXPECT_EQ(trace.distance(0, false), 0);
  EXPECT_EQ(trace.distance(2, false), 30);
  trace.use(0);
  EXPECT_EQ(trace.distance(0, false), 20 + 30 + 20);
  trace.use(1);
  trace.use(2);
  EXPECT_EQ(trace.distance(2, false), UseTrace::kNever);
  EXPECT_EQ(trace.distance(2, true), (20 + 10) + (10 + 20)) << "the rest of this pass, the start of the next";
}

TEST(UseTrace, AChangedOrderIsRecordedAgain) {
  UseTrace trace({1, 1, 1});
  run_pass(trace, {0, 1, 2});
  trace.use(0);
  trace.use(2);
  EXPECT_FALSE(trace.following());
  EXPECT_THAT(trace.upcoming(), IsEmpty());
  trace.end_pass();
  EXPECT_THAT(trace.upcoming(), ElementsAre(0, 2));
}

TEST(UseTrace, ALongerOrShorterPassIsRecordedAgain) {
  UseTrace trace({1, 1, 1});
  run_pass(trace, {0, 1, 2});
  run_pass(trace, {0, 1});
  EXPECT_THAT(trace.upcoming(), ElementsAre(0, 1));
  run_pass(trace, {0, 1, 2, 2});
  EXPECT_THAT(trace.upcoming(), ElementsAre(0, 1, 2, 2));
}

TEST(UseTrace, ARestartKeepsTheExpectedOrder) {
  UseTrace trace({1, 1});
  run_pass(trace, {0, 1});
  trace.use(1);
  trace.restart();
  EXPECT_TRUE(trace.following());
  EXPECT_THAT(trace.upcoming(), ElementsAre(0, 1));
}

}  // namespace
}  // namespace ds::zero
