#include "launcher/processes/exit_cause.h"

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <csignal>

namespace ds::launcher {
namespace {

using ::testing::AllOf;
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

}  // namespace
}  // namespace ds::launcher
