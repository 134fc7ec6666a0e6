// Ranks that do what they should not: how it ends, and what is said.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/faults/drill.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

class FaultDrill : public ::testing::TestWithParam<std::string> {
 protected:
  Outcome run(const std::string& fault, int rank = 1) { return drill_.run(GetParam(), fault, rank); }
  bool shared_memory() const { return GetParam() == "shm"; }

  Drill drill_;
};

const std::string kMetrics = "all_reduce 'metrics' (Float[5], sum, number 17 of group world, step 3)";

TEST_P(FaultDrill, NoneLeavesNothingBehind) {
  const Outcome outcome = run("none");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("trained\n"), HasSubstr("[rank 2] trained\n"), Not(HasSubstr("warning"))));
  EXPECT_FALSE(drill_.left_records());
}

TEST_P(FaultDrill, ASlowRankIsNamedAndWaitedFor) {
  const Outcome outcome = run("sleep");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("s: ranks 0 and 2 wait in " + kMetrics + "; rank 1 ("),
                                  HasSubstr("has not entered it: it is alive, for "),
                                  HasSubstr(" s in the program (data, forward), "), HasSubstr("step 3"),
                                  HasSubstr(" < drill::load_slowly; the last it entered is "),
                                  HasSubstr("the stall is over: all ranks go on"), HasSubstr("trained\n")));
  const nlohmann::json explained = drill_.explained();
  ASSERT_TRUE(explained.is_object());
  EXPECT_EQ(explained["cause"], "late");
  EXPECT_EQ(explained["guilty"], nlohmann::json({1}));
  EXPECT_EQ(explained["ranks"].size(), 3);
}

// Ctrl-Z, and fg after more than the limit: all were stopped.
TEST_P(FaultDrill, AJobThatIsStoppedGoesOn) {
  Launched launched(drill_.settings(GetParam(), "none", 1));
  ASSERT_TRUE(wait_until([&] { return launched.err().find("plan:") != std::string::npos; }));
  launched.send(SIGTSTP);
  std::this_thread::sleep_for(std::chrono::duration<double>(4 * kLimit));
  launched.send(SIGCONT);
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_THAT(launched.out(), HasSubstr("trained\n"));
  EXPECT_THAT(launched.err(), Not(HasSubstr("stalled")));
}

TEST_P(FaultDrill, AStoppedRankEndsTheJob) {
  const Outcome outcome = run("stop");
  EXPECT_TRUE(ended_by_verdict(outcome)) << outcome.exit_code << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("ranks 0 and 2 wait in " + kMetrics + "; rank 1 ("),
                                  HasSubstr("it is stopped by a signal (SIGSTOP, or a debugger)"),
                                  HasSubstr("` lets it go on"), Not(HasSubstr("trained"))));
  EXPECT_EQ(drill_.explained()["cause"], "dead");
}

// Whose store the others talk through.
TEST_P(FaultDrill, AStoppedFirstRankEndsTheJob) {
  const Outcome outcome = run("stop", 0);
  EXPECT_TRUE(ended_by_verdict(outcome)) << outcome.exit_code << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("rank 1 waits in " + kMetrics + "; rank 0 ("),
                                  HasSubstr("it is stopped by a signal (SIGSTOP, or a debugger)")));
}

TEST_P(FaultDrill, AKilledRankIsTheOneThatFailed) {
  const Outcome outcome = run("kill");
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("rank 1 (pid "));
  EXPECT_TRUE(drill_.left_records());
}

TEST_P(FaultDrill, TheRankThatThrewIsTheOneThatFailed) {
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Outcome outcome = run("throw");
    EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
    EXPECT_THAT(outcome.text, AllOf(HasSubstr("ds-launch: rank 1 (pid "), HasSubstr("  | the drill throws")));
  }
}

// Rank 0 has the store of the rendezvous: what the others find when they say goodbye is no news.
TEST_P(FaultDrill, GoodbyesToARankThatFailedAreSilent) {
  for (const int rank : {0, 1}) {
    for (const char* fault : {"throw", "config"}) {
      const Outcome outcome = drill_.run(GetParam(), fault, rank);
      EXPECT_NE(outcome.exit_code, 0) << outcome.text;
      EXPECT_THAT(outcome.text, AllOf(Not(HasSubstr("frame #")), Not(HasSubstr("Bytes failed")),
                                      Not(HasSubstr("Value failed")), Not(HasSubstr("TCPStore"))))
          << fault << " on rank " << rank;
    }
  }
}

TEST_P(FaultDrill, ARankThatLeavesIsMissed) {
  const Outcome outcome = run("leave");
  EXPECT_NE(outcome.exit_code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, ::testing::ContainsRegex("'metrics'.*rank 1"));
}

// Shared memory sees it at once, by itself; over the network the contract tells.
TEST_P(FaultDrill, DifferentCollectivesAreToldWithBothSides) {
  const std::vector<std::pair<std::string, std::string>> faults = {
      {"skip", "reduce_scatter 'gradients of bucket 0' (Float[192], avg, number 17 of group world, step 3)"},
      {"size", "all_reduce 'metrics' (Float[6], sum, number 17 of group world, step 3)"},
      {"dtype", "all_reduce 'metrics' (Int[5], sum, number 17 of group world, step 3)"},
      {"label", "all_reduce 'other metrics' (Float[5], sum, number 17 of group world, step 3)"}};
  for (const auto& [fault, theirs] : faults) {
    const Outcome outcome = run(fault);
    EXPECT_THAT(outcome.text, HasSubstr("ranks issued different collectives: ")) << fault;
    EXPECT_THAT(outcome.text, Not(HasSubstr("trained"))) << fault;
    if (shared_memory()) {
      EXPECT_EQ(outcome.exit_code, 1) << fault;
      continue;
    }
    EXPECT_NE(outcome.exit_code, 0) << fault;
    EXPECT_THAT(outcome.text, HasSubstr("ranks 0 and 2 issued " + kMetrics + ", rank 1 " + theirs)) << fault;
    EXPECT_EQ(drill_.explained()["cause"], "difference") << fault;
  }
}

TEST_P(FaultDrill, AnotherConfigIsRefused) {
  const Outcome outcome = run("config");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("the ds_config of rank 1 differs from that of rank 0: "),
                                  HasSubstr(" on rank 0, "), Not(HasSubstr("trained"))));
}

TEST_P(FaultDrill, ANotANumberIsTracedToItsRank) {
  const Outcome outcome = run("nan");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("step 3: the gradient is not finite: first in parameter 0.weight, element 0"),
                    HasSubstr("rank 1's loss of micro-batch 0 is nan"), Not(HasSubstr("trained"))));
}

TEST_P(FaultDrill, RanksThatWaitForEachOtherAreTold) {
  const Outcome outcome = run("receive");
  EXPECT_TRUE(ended_by_verdict(outcome)) << outcome.exit_code << outcome.text;
  EXPECT_THAT(
      outcome.text,
      HasSubstr("rank 0 waits in recv (Float[3], from rank 1, message 1 of group world) for rank 1, rank 1 waits "
                "in recv (Float[3], from rank 0, message 1 of group world) for rank 0"));
}

INSTANTIATE_TEST_SUITE_P(Backends, FaultDrill, ::testing::Values("shm", "gloo"),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace ds::launcher::testing
