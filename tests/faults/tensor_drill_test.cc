// Ranks of a tensor axis that do what they should not: how it ends, and who is named.
#include <gmock/gmock.h>
#include <signal.h>

#include "tests/faults/drill.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Ranks 0 and 1 have parts of the same layers, and 2 and 3: rank 1 is the faulty one.
class TensorDrill : public ::testing::TestWithParam<std::string> {
 protected:
  Outcome run(const std::string& fault) { return drill_.run(GetParam(), fault, 1); }

  Drill drill_{2};
};

TEST_P(TensorDrill, NoneLeavesNothingBehind) {
  const Outcome outcome = run("none");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("[rank 3] trained\n"), HasSubstr("each axis lies inside a host"),
                                  Not(HasSubstr("warning"))));
  EXPECT_FALSE(drill_.left_records());
}

// In the middle of forward, at the sum of a layer.
TEST_P(TensorDrill, AStoppedRankEndsTheJob) {
  const Outcome outcome = run("stop");
  EXPECT_TRUE(ended_by_verdict(outcome)) << outcome.exit_code << outcome.text;
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("rank 0 waits in all_reduce"), HasSubstr("; rank 1 ("),
                    HasSubstr("it is stopped by a signal (SIGSTOP, or a debugger)"), Not(HasSubstr("trained"))));
}

TEST_P(TensorDrill, ASlowRankIsNamedAndWaitedFor) {
  const Outcome outcome = run("sleep");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("rank 0 waits in all_reduce"), HasSubstr("rank 1 ("),
                                  HasSubstr(" < drill::load_slowly"), HasSubstr("trained\n")));
}

TEST_P(TensorDrill, AKilledRankIsTheOneThatFailed) {
  const Outcome outcome = run("kill");
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL) << outcome.text;
  EXPECT_THAT(outcome.text, HasSubstr("rank 1 (pid "));
}

TEST_P(TensorDrill, AnotherBatchIsAnErrorThatNamesTheAxis) {
  const Outcome outcome = run("batch");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("step(): ranks 0 and 1 of one tensor axis got different batches. rank 0: step 3"),
                    HasSubstr("ranks of another tensor axis do not agree"), Not(HasSubstr("trained"))));
}

TEST_P(TensorDrill, OtherRulesAreRefused) {
  const Outcome outcome = run("rules");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("rule 1 of .split"), HasSubstr("rank 1"), Not(HasSubstr("trained"))));
}

TEST_P(TensorDrill, AnotherConfigIsRefused) {
  const Outcome outcome = run("config");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.text;
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("ds_config of rank 1 differs from that of rank 0"), Not(HasSubstr("trained"))));
}

// Of 2 x 2 x 2 ranks, number 5 is of the second stage: the others wait for it along each axis, directly or not.
TEST(ThreeAxesDrill, AStoppedRankIsNamedWithItsPlace) {
  const Outcome outcome = Drill(2, 2).run("shm", "stop", 5);
  EXPECT_TRUE(ended_by_verdict(outcome)) << outcome.exit_code << outcome.text;
  EXPECT_THAT(outcome.text,
              AllOf(HasSubstr("; rank 5 ("), HasSubstr("; pipe 1, data 0, tensor 1) has not entered it"),
                    HasSubstr("it is stopped by a signal (SIGSTOP, or a debugger)"), Not(HasSubstr("trained"))));
}

TEST(ThreeAxesDrill, AKilledRankIsTheOneThatFailed) {
  const Outcome outcome = Drill(2, 2).run("gloo", "kill", 5);
  EXPECT_EQ(outcome.exit_code, 128 + SIGKILL) << outcome.text;
  EXPECT_THAT(outcome.text, AllOf(HasSubstr("rank 5 (pid "), Not(HasSubstr("trained"))));
}

INSTANTIATE_TEST_SUITE_P(Backends, TensorDrill, ::testing::Values("shm", "gloo"),
                         [](const auto& backend) { return backend.param; });

}  // namespace
}  // namespace ds::launcher::testing
