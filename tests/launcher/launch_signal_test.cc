// Signals that reach ds-launch reach the ranks.
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class EndingSignal : public ::testing::TestWithParam<int> {};

TEST_P(EndingSignal, EndsAllRanks) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "3"}, .actions = {"touch", folder / "pid.%", "pause"}});
  for (const char* rank : {"0", "1", "2"}) ASSERT_TRUE(wait_until([&] { return exists(folder / "pid." + rank); }));
  launched.send(GetParam());
  EXPECT_EQ(launched.wait(), 128 + GetParam());
  for (const char* rank : {"0", "1", "2"}) EXPECT_TRUE(process_gone(pid_in(folder / "pid." + rank)));
  EXPECT_THAT(launched.err(), Not(HasSubstr("failed")));  // ranks that end because they were asked to are no failure
}

TEST_P(EndingSignal, LetsRanksEndWell) {
  TemporaryFolder folder;
  Launched launched(
      {.flags = {"--num_procs", "2"},
       .actions = {"catch", std::to_string(GetParam()), folder / "saved.%", "touch", folder / "pid.%", "pause"}});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(wait_until([&] { return exists(folder / "pid." + rank); }));
  launched.send(GetParam());
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_TRUE(exists(folder / "saved.0"));
  EXPECT_TRUE(exists(folder / "saved.1"));
}

INSTANTIATE_TEST_SUITE_P(LaunchSignal, EndingSignal, ::testing::Values(SIGINT, SIGTERM, SIGHUP));

TEST(LaunchSignal, ASecondInterruptKills) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2"},
                     .actions = {"ignore", std::to_string(SIGINT), "touch", folder / "pid.%", "pause"}});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(wait_until([&] { return exists(folder / "pid." + rank); }));
  launched.send(SIGINT);
  ASSERT_TRUE(wait_until([&] { return launched.err().find("SIGINT passed on") != std::string::npos; }));
  launched.send(SIGINT);
  EXPECT_EQ(launched.wait(), 128 + SIGINT);
  EXPECT_TRUE(process_gone(pid_in(folder / "pid.0")));
}

// The kernel would keep no status of the ranks. Ranks that are over at once, and ranks that last.
TEST(LaunchSignal, EndsOfRanksAreSeenWhereTheParentIgnoresThem) {
  const std::vector<std::vector<std::string>> programs = {{"/bin/true"}, {"/bin/sleep", "0.3"}};
  for (const std::vector<std::string>& program : programs) {
    Launched launched({.flags = {"--num_procs", "2"}, .program = program, .child_ends_ignored = true});
    EXPECT_EQ(launched.wait(), 0) << launched.err();
  }
  Launched failed({.flags = {"--num_procs", "2"}, .program = {"/bin/false"}, .child_ends_ignored = true});
  EXPECT_EQ(failed.wait(), 1) << failed.err();
}

TEST(LaunchSignal, TheTimeToEndIsLimited) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2", "--signal_grace", "0.2"},
                     .actions = {"ignore", std::to_string(SIGTERM), "touch", folder / "pid.%", "pause"}});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(wait_until([&] { return exists(folder / "pid." + rank); }));
  launched.send(SIGTERM);
  EXPECT_EQ(launched.wait(), 128 + SIGTERM);
  EXPECT_THAT(launched.err(), HasSubstr("not ended within 0.2 s: killing ranks 0-1"));
}

TEST(LaunchSignal, UserSignalsArePassedOnAndEndNothing) {
  TemporaryFolder folder;
  Launched launched(
      {.flags = {"--num_procs", "2"},
       .actions = {"catch", std::to_string(SIGUSR1), folder / "got.%", "touch", folder / "pid.%", "pause"}});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(wait_until([&] { return exists(folder / "pid." + rank); }));
  launched.send(SIGUSR1);
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_TRUE(exists(folder / "got.1"));
}

TEST(LaunchSignal, UnderNohupAHangupEndsNothing) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2"},
                     .actions = {"touch", folder / "pid.%", "until", folder / "go"},
                     .hangup_ignored = true});
  for (const char* rank : {"0", "1"}) ASSERT_TRUE(wait_until([&] { return exists(folder / "pid." + rank); }));
  launched.send(SIGHUP);
  kill(pid_in(folder / "pid.1"), SIGHUP);
  std::ofstream(folder / "go");
  EXPECT_EQ(launched.wait(), 0);
}

// In place of srun, which is looked for in PATH and is asked for no version.
class AnotherLauncher : public ::testing::Test {
 protected:
  std::string pid_file() const { return folder_ / "pid"; }
  Launched::Settings started_by(const std::string& script, const std::string& grace) const {
    const std::string program = folder_.write("srun", script);
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
    return {.flags = {"--launcher", "slurm", "--num_procs", "1", "--signal_grace", grace},
            .environment = {"PATH=" + folder_.path().string() + ":/usr/bin:/bin"}};
  }
  std::string that_ignores(int number) const {
    return "#!/bin/sh\nexec " DS_RANK_PROGRAM " ignore " + std::to_string(number) + " touch " + pid_file() + " pause\n";
  }

  TemporaryFolder folder_;
};

TEST_F(AnotherLauncher, HearsASecondInterruptAndIsKilledAtTheThird) {
  Launched launched(started_by(that_ignores(SIGINT), "30"));
  ASSERT_TRUE(wait_until([&] { return exists(pid_file()); }));
  launched.send(SIGINT);
  ASSERT_TRUE(wait_until([&] { return launched.err().find("SIGINT passed on to srun") != std::string::npos; }));
  launched.send(SIGINT);
  ASSERT_TRUE(wait_until([&] { return launched.err().find("second SIGINT passed on") != std::string::npos; }));
  launched.send(SIGINT);
  EXPECT_EQ(launched.wait(), 128 + SIGINT);
  EXPECT_THAT(launched.err(), HasSubstr("not ended after the second SIGINT: killing srun"));
  EXPECT_TRUE(process_gone(pid_in(pid_file())));
}

TEST_F(AnotherLauncher, MayEndByItselfAtTheSecondInterrupt) {
  const std::string interrupted = folder_ / "interrupted";
  Launched launched(started_by("#!/bin/sh\ntrap '[ -e " + interrupted + " ] && exit 0; : >" + interrupted +
                                   "' INT\necho $$ >" + pid_file() + "\nwhile :; do sleep 0.01; done\n",
                               "30"));
  ASSERT_TRUE(wait_until([&] { return exists(pid_file()); }));
  launched.send(SIGINT);
  ASSERT_TRUE(wait_until([&] { return exists(interrupted); }));
  launched.send(SIGINT);
  EXPECT_EQ(launched.wait(), 128 + SIGINT);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("second SIGINT passed on to srun"), Not(HasSubstr("killing srun"))));
}

TEST_F(AnotherLauncher, HasALimitedTimeToEnd) {
  Launched launched(started_by(that_ignores(SIGTERM), "0.2"));
  ASSERT_TRUE(wait_until([&] { return exists(pid_file()); }));
  launched.send(SIGTERM);
  EXPECT_EQ(launched.wait(), 128 + SIGTERM);
  EXPECT_THAT(launched.err(), HasSubstr("not ended within 0.2 s: killing srun"));
}

}  // namespace
}  // namespace ds::launcher::testing
