#include "launcher/ranks/exit_cause.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <csignal>

#include "launcher/ranks/failure_report.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

int exited(int code) { return W_EXITCODE(code, 0); }
int signalled(int signal) { return W_EXITCODE(0, signal); }

TEST(ExitCause, SaysHowAProcessEnded) {
  EXPECT_EQ(exit_words(exited(3)), "exit code 3");
  EXPECT_THAT(exit_words(signalled(SIGSEGV)), StartsWith("killed by SIGSEGV (segmentation fault"));
  EXPECT_THAT(exit_words(signalled(SIGABRT) | WCOREFLAG), AllOf(HasSubstr("SIGABRT (abort"), HasSubstr("core dumped")));
  EXPECT_EQ(exit_words(signalled(SIGXCPU)), "killed by SIGXCPU (CPU time limit exceeded)");
  EXPECT_EQ(exit_words(signalled(SIGRTMIN + 3)), "killed by signal " + std::to_string(SIGRTMIN + 3));
  EXPECT_THAT(exit_words(exited(139)), HasSubstr("exit code 139, which a shell gives for SIGSEGV"));
  EXPECT_EQ(exit_words(exited(255)), "exit code 255");
}

TEST(ExitCause, GivesTheCodeOfAShell) {
  EXPECT_EQ(exit_code_of(exited(0)), 0);
  EXPECT_EQ(exit_code_of(exited(3)), 3);
  EXPECT_EQ(exit_code_of(signalled(SIGKILL)), 137);
}

TEST(FailureReport, NamesRankCauseAndMemory) {
  const Failure failure{.rank = 3, .pid = 4711, .status = exited(1), .peak_rss_bytes = 3LL << 29};
  EXPECT_EQ(cause_line(failure), "rank 3 (pid 4711) failed: exit code 1; peak memory 1.5 GiB");
}

TEST(FailureReport, RecognisesAnOutOfMemoryKill) {
  Failure failure{.rank = 0, .pid = 1, .status = signalled(SIGKILL)};
  failure.before.group_kills = 2;
  failure.after = {.group_kills = 3, .host_kills = {}, .group_limit = 512 << 20};
  EXPECT_THAT(cause_line(failure),
              HasSubstr("by the kernel's out-of-memory killer, because the control group reached its "
                        "memory limit of 512 MiB"));
  failure.status = exited(137);  // a shell whose last command was killed
  EXPECT_THAT(cause_line(failure), HasSubstr("out-of-memory killer"));
  failure.after.group_kills = 2;
  failure.status = signalled(SIGKILL);
  EXPECT_THAT(cause_line(failure), HasSubstr("by another process"));
  failure.before = failure.after = {};
  EXPECT_THAT(cause_line(failure), HasSubstr("the kernel does not tell"));
}

TEST(FailureReport, ShowsTheLastLines) {
  LastLines lines;
  EXPECT_THAT(last_lines_report({.rank = 1}, lines), ElementsAre("rank 1 had written nothing"));
  lines.add("hello");
  EXPECT_THAT(last_lines_report({.rank = 1}, lines), ElementsAre("last lines of rank 1:", "  | hello"));
}

TEST(FailureReport, WritesListsOfRanks) {
  EXPECT_EQ(rank_list_text({4}), "rank 4");
  EXPECT_EQ(rank_list_text({0, 1, 2, 5}), "ranks 0-2, 5");
}

}  // namespace
}  // namespace ds::launcher
