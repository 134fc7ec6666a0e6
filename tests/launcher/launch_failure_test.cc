// What happens when a rank fails.
#include <gmock/gmock.h>

#include <csignal>

#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LaunchFailure, KeepsTheExitCodeAndEndsTheOthers) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "3"},
                     .actions = {"touch", folder / "pid.%", "on", "1", "until", folder / "pid.0", "on", "1", "until",
                                 folder / "pid.2", "on", "1", "print", "I give up", "on", "1", "exit", "3", "pause"}});
  EXPECT_EQ(launched.wait(), 3);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("rank 1 (pid "), HasSubstr(") failed: exit code 3; peak memory "),
                                    HasSubstr("ending ranks 0, 2\n"), HasSubstr("  | I give up\n")));
  EXPECT_TRUE(process_gone(pid_in(folder / "pid.0")));
  EXPECT_TRUE(process_gone(pid_in(folder / "pid.2")));
}

TEST(LaunchFailure, SaysASignalInWords) {
  Launched launched({.flags = {"--num_procs", "2"}, .actions = {"on", "0", "raise", std::to_string(SIGSEGV), "pause"}});
  EXPECT_EQ(launched.wait(), 128 + SIGSEGV);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("rank 0 (pid "), HasSubstr("killed by SIGSEGV (segmentation fault"),
                                    HasSubstr("rank 0 had written nothing")));
}

TEST(LaunchFailure, TellsAKillFromOutsideFromAnOutOfMemoryKill) {
  Launched launched({.flags = {"--num_procs", "2"}, .actions = {"on", "1", "raise", std::to_string(SIGKILL), "pause"}});
  EXPECT_EQ(launched.wait(), 128 + SIGKILL);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("killed by SIGKILL"), HasSubstr("by another process"),
                                    Not(HasSubstr("out-of-memory killer,"))));
}

// Rank 2 fails; the others notice and fail with codes of their own right after. Rank 2 is to blame, every time.
TEST(LaunchFailure, NamesTheFirstRankToFail) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    TemporaryFolder folder;
    Launched launched({.flags = {"--num_procs", "4", "--quiet"}, .actions = {"ignore", "15",
                                                                             "touch",  folder / "ready.%",
                                                                             "on",     "2",
                                                                             "until",  folder / "ready.0",
                                                                             "on",     "2",
                                                                             "until",  folder / "ready.1",
                                                                             "on",     "2",
                                                                             "until",  folder / "ready.3",
                                                                             "on",     "2",
                                                                             "touch",  folder / "failing",
                                                                             "on",     "2",
                                                                             "exit",   "7",
                                                                             "until",  folder / "failing",
                                                                             "gone",   folder / "ready.2",
                                                                             "exit",   "1"}});
    ASSERT_EQ(launched.wait(), 7);
    EXPECT_THAT(launched.err(), AllOf(HasSubstr("rank 2 (pid "), Not(HasSubstr("rank 0 (pid "))));
  }
}

// Rank 0 throws, and its peers, which lose it then, have ended before it has.
TEST(LaunchFailure, ARankThatTellsOfAnotherRanksEndIsNotToBlame) {
  TemporaryFolder folder;
  const char* const told =
      "error: job rank %: all_reduce cannot finish: rank 0 has destroyed its communicator; rank 0 (...)";
  Launched launched({.flags = {"--num_procs", "3"}, .actions = {"touch",  folder / "pid.%",
                                                                "until",  folder / "pid.0",
                                                                "until",  folder / "pid.1",
                                                                "until",  folder / "pid.2",
                                                                "not-on", "0",
                                                                "error",  told,
                                                                "not-on", "0",
                                                                "exit",   "1",
                                                                "gone",   folder / "pid.1",
                                                                "gone",   folder / "pid.2",
                                                                "error",  "error: the disk is full",
                                                                "exit",   "3"}});
  EXPECT_EQ(launched.wait(), 3);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("rank 0 (pid "), HasSubstr("  | error: the disk is full\n"),
                                    Not(HasSubstr("rank 1 (pid ")), Not(HasSubstr("rank 2 (pid "))));
}

TEST(LaunchFailure, WhereAllRanksTellOfOthersTheFirstIsNamed) {
  TemporaryFolder folder;
  const char* const told = "error: rank 2 has died";
  Launched launched({.flags = {"--num_procs", "2"}, .actions = {"touch", folder / "pid.%",
                                                                "until", folder / "pid.0",
                                                                "on",    "0",
                                                                "until", folder / "pid.1",
                                                                "on",    "0",
                                                                "gone",  folder / "pid.1",
                                                                "error", told,
                                                                "on",    "1",
                                                                "exit",  "4",
                                                                "exit",  "5"}});
  EXPECT_EQ(launched.wait(), 4);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("rank 1 (pid "), Not(HasSubstr("rank 0 (pid "))));
}

TEST(LaunchFailure, KillsRanksThatIgnoreTheEnd) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2", "--failure_grace", "0.2"},
                     .actions = {"ignore", std::to_string(SIGTERM), "touch", folder / "pid.%", "on", "0", "pause",
                                 "until", folder / "pid.0", "exit", "5"}});
  EXPECT_EQ(launched.wait(), 5);
  EXPECT_THAT(launched.err(), HasSubstr("not ended within 0.2 s: killing rank 0"));
  EXPECT_TRUE(process_gone(pid_in(folder / "pid.0")));
}

TEST(LaunchFailure, ShowsTheLastTwentyLines) {
  std::vector<std::string> actions;
  for (int line = 1; line <= 30; ++line) actions.insert(actions.end(), {"print", "line " + std::to_string(line) + "."});
  actions.insert(actions.end(), {"error", "the reason", "exit", "9"});
  Launched launched({.flags = {"--num_procs", "1", "--quiet"}, .actions = actions});
  EXPECT_EQ(launched.wait(), 9);
  const std::string err = launched.err();
  EXPECT_THAT(err, AllOf(HasSubstr("  | line 30.\n"), HasSubstr("  | line 12.\n"), HasSubstr("  | the reason\n"),
                         Not(HasSubstr("  | line 10.\n"))));
}

TEST(LaunchFailure, TellsHowToReadFlightRecords) {
  TemporaryFolder folder;
  const std::string records = folder / "it's here";
  std::filesystem::create_directory(records);
  const auto error_of = [&](const char* script) {
    Launched launched({.flags = {"--num_procs", "1"},
                       .program = {"/bin/sh", "-c", script},
                       .environment = {"DS_FLIGHT_FOLDER=" + records, "DS_FLIGHT_JOB=outer"}});
    EXPECT_EQ(launched.wait(), 3);
    return launched.err();
  };
  EXPECT_THAT(error_of("exit 3"), Not(HasSubstr("ds-tool")));
  const std::string error =
      error_of("cd \"$DS_FLIGHT_FOLDER\" && mkdir $DS_FLIGHT_JOB && >$DS_FLIGHT_JOB/rank0.flight; exit 3");
  const std::filesystem::directory_iterator made(records);
  EXPECT_NE(made->path().filename(), "outer");
  EXPECT_THAT(error, HasSubstr("what the ranks did last: ds-tool explain '" + (folder / "it'\\''s here/") +
                               made->path().filename().string() + "'\n"));
}

TEST(LaunchFailure, TellsThePeakMemory) {
  Launched launched({.flags = {"--num_procs", "1"}, .actions = {"allocate", "200", "exit", "1"}});
  EXPECT_EQ(launched.wait(), 1);
  EXPECT_THAT(launched.err(), ::testing::ContainsRegex("peak memory 20[0-9] MiB"));
}

// A program of dsengine, to ds-launch, is one whose file names the library.
TEST(LaunchFailure, AProgramThatNeverMeetsIsToldAtItsEnd) {
  TemporaryFolder folder;
  const auto run = [&](const std::string& script, const std::string& ranks) {
    const std::string file = folder.write("train.sh", "#!/bin/sh\n# libdsengine.so\n" + script);
    std::filesystem::permissions(file, std::filesystem::perms::owner_all);
    Launched launched({.flags = {"--num_procs", ranks}, .program = {file}, .environment = {"TMPDIR=" + (folder / "")}});
    EXPECT_EQ(launched.wait(), 0);
    return launched.err();
  };
  const char* const told = "never called initialize() or init_distributed(): each of the 2 ranks ran all of it, alone";
  EXPECT_THAT(run("exit 0\n", "2"), HasSubstr(told));
  EXPECT_THAT(run("exit 0\n", "1"), Not(HasSubstr("never called")));
  EXPECT_THAT(run(">$DS_JOINED_FILE\n", "2"), Not(HasSubstr("never called")));
  const std::string late =
      "if [ $RANK = 0 ]; then >$DS_JOINED_FILE; sleep 1; else\n"
      "while [ ! -e ${DS_JOINED_FILE%1}0 ]; do sleep 0.05; done; fi\n";
  EXPECT_THAT(run(late, "2"), HasSubstr("rank 1 has ended without a call of initialize() or init_distributed()"));
  Launched other({.flags = {"--num_procs", "2"}, .program = {"/bin/true"}});
  EXPECT_EQ(other.wait(), 0);
  EXPECT_THAT(other.err(), Not(HasSubstr("never called")));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_FALSE(entry.path().string().ends_with(".joined.0")) << entry.path();
  }
}

TEST(LaunchFailure, OtherRanksMayEndEarlyAndWell) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "3"}, .actions = {"on", "0", "exit", "0", "print", "still here"}});
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_THAT(launched.out(), AllOf(HasSubstr("[rank 1] still here"), HasSubstr("[rank 2] still here")));
}

}  // namespace
}  // namespace ds::launcher::testing
