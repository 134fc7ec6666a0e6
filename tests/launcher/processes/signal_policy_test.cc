#include "launcher/processes/signal_policy.h"

#include <gtest/gtest.h>

#include <csignal>

namespace ds::launcher {
namespace {

using Meaning = SignalMeaning;

TEST(SignalPolicy, TheFirstOfThemBeginsTheEnd) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    SignalPolicy policy;
    EXPECT_FALSE(policy.asked_to_end());
    EXPECT_EQ(policy.ending_signal(), 0);
    EXPECT_EQ(policy.take(number), Meaning::kEnd) << number;
    EXPECT_TRUE(policy.asked_to_end());
    EXPECT_EQ(policy.ending_signal(), number);
  }
}

TEST(SignalPolicy, FurtherOnesArePassedOnAndChangeNothing) {
  SignalPolicy policy;
  EXPECT_EQ(policy.take(SIGTERM), Meaning::kEnd);
  EXPECT_EQ(policy.take(SIGTERM), Meaning::kPassOn);
  EXPECT_EQ(policy.take(SIGQUIT), Meaning::kPassOn);
  EXPECT_EQ(policy.ending_signal(), SIGTERM);
}

TEST(SignalPolicy, ASecondInterruptKills) {
  SignalPolicy policy;
  EXPECT_EQ(policy.take(SIGINT), Meaning::kEnd);
  EXPECT_EQ(policy.take(SIGTERM), Meaning::kPassOn);
  EXPECT_EQ(policy.take(SIGINT), Meaning::kKill);
  EXPECT_EQ(policy.take(SIGINT), Meaning::kKill);
  EXPECT_EQ(policy.ending_signal(), SIGINT);
}

TEST(SignalPolicy, TheFirstInterruptAfterAnotherSignalDoesNotKill) {
  SignalPolicy policy;
  EXPECT_EQ(policy.take(SIGTERM), Meaning::kEnd);
  EXPECT_EQ(policy.take(SIGINT), Meaning::kPassOn);
  EXPECT_EQ(policy.take(SIGINT), Meaning::kKill);
  EXPECT_EQ(policy.ending_signal(), SIGTERM);
}

TEST(SignalPolicy, OthersEndNothing) {
  SignalPolicy policy;
  for (const int number : {SIGUSR1, SIGUSR2, SIGSTOP, SIGCONT}) EXPECT_EQ(policy.take(number), Meaning::kPassOn);
  for (const int number : {SIGCHLD, SIGWINCH}) EXPECT_EQ(policy.take(number), Meaning::kNone);
  EXPECT_EQ(policy.take(SIGTSTP), Meaning::kStop);
  EXPECT_EQ(policy.take(SIGTSTP), Meaning::kStop);
  EXPECT_FALSE(policy.asked_to_end());
}

TEST(SignalPolicy, SaysHowLongTheRanksHave) {
  EXPECT_EQ(passed_on_text(SIGTERM, "all ranks", 0.5),
            "SIGTERM passed on to all ranks; they have 0.5 s to end, a second SIGINT kills them");
  EXPECT_EQ(passed_on_text(SIGINT, "all ranks", 0),
            "SIGINT passed on to all ranks; waiting for them to end, a second SIGINT kills them");
}

}  // namespace
}  // namespace ds::launcher
