// Times are made up.
#include "launcher/processes/deadline.h"

#include <gtest/gtest.h>

namespace ds::launcher {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Deadline::Time kStart = Deadline::Time(seconds(1000));

TEST(Deadline, PassesAtItsTime) {
  const Deadline deadline = Deadline::in(2.5, kStart);
  EXPECT_FALSE(deadline.passed(kStart));
  EXPECT_FALSE(deadline.passed(kStart + milliseconds(2499)));
  EXPECT_TRUE(deadline.passed(kStart + milliseconds(2500)));
  EXPECT_TRUE(deadline.passed(kStart + seconds(1000)));
  EXPECT_TRUE(Deadline::in(0, kStart).passed(kStart));
}

TEST(Deadline, NeverPassesWithoutATime) {
  EXPECT_FALSE(Deadline().passed(Deadline::Time::max()));
  EXPECT_FALSE(Deadline(std::optional<Deadline::Time>()).passed(Deadline::Time::max()));
  EXPECT_EQ(Deadline().poll_timeout_ms(kStart), -1);
}

TEST(Deadline, TheSoonerOneOfTwo) {
  const Deadline soon = Deadline::in(1, kStart), late = Deadline::in(2, kStart), never;
  EXPECT_EQ(soon.or_sooner(late).poll_timeout_ms(kStart), 1000);
  EXPECT_EQ(late.or_sooner(soon).poll_timeout_ms(kStart), 1000);
  EXPECT_EQ(late.or_sooner(never).poll_timeout_ms(kStart), 2000);
  EXPECT_EQ(never.or_sooner(late).poll_timeout_ms(kStart), 2000);
  EXPECT_EQ(never.or_sooner(never).poll_timeout_ms(kStart), -1);
}

TEST(Deadline, PollWaitsUntilItHasPassed) {
  const Deadline deadline = kStart + milliseconds(5);
  EXPECT_EQ(deadline.poll_timeout_ms(kStart), 5);
  EXPECT_EQ(deadline.poll_timeout_ms(kStart + std::chrono::microseconds(4001)), 1);  // not 0: that would spin
  EXPECT_EQ(deadline.poll_timeout_ms(kStart + milliseconds(5)), 0);
  EXPECT_EQ(deadline.poll_timeout_ms(kStart + seconds(5)), 0);            // not -1: that would be for ever
  EXPECT_EQ(Deadline::in(1e8, kStart).poll_timeout_ms(kStart), 3600000);  // an int of milliseconds holds 24 days
}

}  // namespace
}  // namespace ds::launcher
