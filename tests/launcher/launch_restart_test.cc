// Ranks that are started again after a failure, on one machine.
#include <gmock/gmock.h>

#include <csignal>

#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LaunchRestart, StartsAllRanksAgain) {
  Launched launched(
      {.flags = {"--num_procs", "2", "--max_restarts", "2"},
       .actions = {"env", "DS_RESTART_COUNT", "env", "TORCHELASTIC_RESTART_COUNT", "env", "TORCHELASTIC_MAX_RESTARTS",
                   "start", "0", "on", "1", "exit", "3", "start", "0", "pause", "env", "WORLD_SIZE"}});
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_THAT(launched.out(),
              AllOf(HasSubstr("[rank 1] DS_RESTART_COUNT=0\n"), HasSubstr("[rank 1] DS_RESTART_COUNT=1\n"),
                    HasSubstr("TORCHELASTIC_RESTART_COUNT=1\n"), HasSubstr("TORCHELASTIC_MAX_RESTARTS=2\n"),
                    HasSubstr("[rank 1] WORLD_SIZE=2\n")));
  EXPECT_THAT(launched.err(), AllOf(HasSubstr(") failed: exit code 3"), HasSubstr("restart 1 of 2\n"),
                                    Not(HasSubstr("restart 2 of 2"))));
}

TEST(LaunchRestart, AKilledRankIsReplaced) {
  Launched launched(
      {.flags = {"--num_procs", "2", "--max_restarts", "1"},
       .actions = {"start", "0", "on", "0", "raise", std::to_string(SIGKILL), "start", "0", "pause", "print", "done"}});
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("rank 0 (pid "), HasSubstr("killed by SIGKILL")));
  EXPECT_THAT(launched.out(), AllOf(HasSubstr("done\n"), HasSubstr("[rank 1] done\n")));
}

TEST(LaunchRestart, EndsWithTheLastFailureWhenNoneIsLeft) {
  Launched launched({.flags = {"--num_procs", "2", "--max_restarts", "2"},
                     .actions = {"on", "0", "pause", "start", "2", "exit", "7", "exit", "5"}});
  EXPECT_EQ(launched.wait(), 7);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("restart 1 of 2"), HasSubstr("restart 2 of 2"),
                                    HasSubstr("no restart is left of 2 (--max_restarts)"), HasSubstr("exit code 5"),
                                    HasSubstr("exit code 7")));
}

TEST(LaunchRestart, NoneWithoutTheFlag) {
  Launched launched({.flags = {"--num_procs", "1"}, .actions = {"env", "DS_RESTART_COUNT", "exit", "5"}});
  EXPECT_EQ(launched.wait(), 5);
  EXPECT_EQ(launched.out(), "DS_RESTART_COUNT=0\n");
  EXPECT_THAT(launched.err(), Not(HasSubstr("restart")));
}

TEST(LaunchRestart, NoneAfterASignal) {
  TemporaryFolder folder;
  Launched launched(
      {.flags = {"--num_procs", "2", "--max_restarts", "3"}, .actions = {"touch", folder / "pid.%", "pause"}});
  for (const char* name : {"pid.0", "pid.1"}) ASSERT_TRUE(wait_until([&] { return exists(folder / name); }));
  launched.send(SIGTERM);
  EXPECT_EQ(launched.wait(), 128 + SIGTERM);
  EXPECT_THAT(launched.err(), Not(HasSubstr("restart 1")));
}

// Ctrl-C while ranks end after a failure.
TEST(LaunchRestart, NoneAfterASignalBehindAFailure) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2", "--max_restarts", "3", "--failure_grace", "60"},
                     .actions = {"on", "0", "ignore", std::to_string(SIGTERM), "on", "0", "touch", folder / "pid.0",
                                 "on", "0", "pause", "until", folder / "pid.0", "exit", "3"}});
  ASSERT_TRUE(wait_until([&] { return launched.err().find("ending rank 0") != std::string::npos; }));
  launched.send(SIGINT);
  EXPECT_EQ(launched.wait(), 3);
  EXPECT_THAT(launched.err(), Not(HasSubstr("restart 1")));
}

TEST(LaunchRestart, NothingOfTheLastStartIsLeft) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2", "--max_restarts", "1"},
                     .actions = {"start",
                                 "0",
                                 "daemon",
                                 folder / "daemon.%",
                                 "start",
                                 "0",
                                 "on",
                                 "1",
                                 "until",
                                 folder / "daemon.0",
                                 "start",
                                 "0",
                                 "on",
                                 "1",
                                 "exit",
                                 "3",
                                 "start",
                                 "0",
                                 "pause",
                                 "gone",
                                 folder / "daemon.0",
                                 "gone",
                                 folder / "daemon.1",
                                 "print",
                                 "alone"}});
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_THAT(launched.out(), AllOf(HasSubstr("alone\n"), HasSubstr("[rank 1] alone\n")));
}

TEST(LaunchRestart, LogsOfBothStartsAreKept) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "1", "--max_restarts", "1", "--enable_each_rank_log", folder / "logs"},
                     .actions = {"env", "DS_RESTART_COUNT", "start", "0", "exit", "3"}});
  EXPECT_EQ(launched.wait(), 0);
  std::string logs;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "logs")) logs += read_file(entry.path());
  EXPECT_THAT(logs, AllOf(HasSubstr("DS_RESTART_COUNT=0\n"), HasSubstr("DS_RESTART_COUNT=1\n")));
}

TEST(LaunchRestart, MoreHostsAreNeededThanThereAre) {
  Launched launched({.flags = {"--standalone", "--min_nodes", "2"}});
  EXPECT_EQ(launched.wait(), 2);
  EXPECT_THAT(launched.err(), HasSubstr("--min_nodes 2: there is 1 host"));
}

}  // namespace
}  // namespace ds::launcher::testing
