#include "launcher/hosts/ask_intervals.h"

#include <gmock/gmock.h>

namespace ds::launcher {
namespace {

using std::chrono::seconds;

TEST(AskIntervals, GrowForAHostThatIsReadyInVain) {
  AskIntervals intervals;
  EXPECT_EQ(intervals.of("a"), seconds(3));
  intervals.on_ready("a");
  EXPECT_EQ(intervals.of("a"), seconds(6));
  EXPECT_EQ(intervals.of("b"), seconds(3));
  for (int time = 0; time < 100; ++time) intervals.on_ready("a");
  EXPECT_EQ(intervals.of("a"), seconds(300));
  intervals.on_used("a");
  EXPECT_EQ(intervals.of("a"), seconds(3));
}

}  // namespace
}  // namespace ds::launcher
