#include "tools/report/child_process.h"

#include <gmock/gmock.h>

namespace ds::tool::report {
namespace {

using ::testing::HasSubstr;

Finished shell(const std::string& script, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
  return run_child({"/bin/sh", "-c", script}, limit);
}

TEST(ChildProcess, KeepsOutputAndErrorsApart) {
  const Finished asked = shell("echo out; echo err >&2");
  EXPECT_TRUE(asked.fine);
  EXPECT_EQ(asked.out, "out\n");
  EXPECT_EQ(asked.err, "err\n");
}

TEST(ChildProcess, ReadsMoreThanAPipeHolds) { EXPECT_EQ(shell("head -c 1000000 /dev/zero").out.size(), 1'000'000U); }

TEST(ChildProcess, HasNoInput) { EXPECT_EQ(shell("cat").out, ""); }

TEST(ChildProcess, TellsHowItEnded) {
  EXPECT_EQ(shell("exit 3").ending, "exit code 3");
  EXPECT_THAT(shell("kill -SEGV $$").ending, HasSubstr("killed by signal 11"));
  EXPECT_THAT(run_child({"/no/such/program"}, std::chrono::seconds(60)).ending, HasSubstr("No such file"));
}

TEST(ChildProcess, IsKilledAtTheLimit) {
  const Finished asked = shell("echo first; exec sleep 600", std::chrono::milliseconds(200));
  EXPECT_FALSE(asked.fine);
  EXPECT_THAT(asked.ending, HasSubstr("still running after 0.2 s"));
}

// Its output is closed, but it has not ended.
TEST(ChildProcess, IsKilledAtTheLimitWhenItSaysNothingMore) {
  EXPECT_THAT(shell("exec sleep 600 >/dev/null 2>&1", std::chrono::milliseconds(200)).ending,
              HasSubstr("still running"));
}

TEST(LastLine, IsTheLastThatIsNotEmpty) {
  EXPECT_EQ(last_line("one\ntwo\n\n"), "two");
  EXPECT_EQ(last_line("one"), "one");
  EXPECT_EQ(last_line("\n"), "");
}

}  // namespace
}  // namespace ds::tool::report
