// No process of a job outlives ds-launch.
#include <gmock/gmock.h>

#include <csignal>
#include <fstream>

#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::HasSubstr;

// Each rank, a process that it started, and one that it started in a session of its own.
const std::vector<std::string> kNames = {"rank.0", "rank.1", "child.0", "child.1", "daemon.0", "daemon.1"};

std::vector<std::string> family(const TemporaryFolder& folder) {
  return {"child", folder / "child.%", "daemon", folder / "daemon.%", "touch", folder / "rank.%"};
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

bool all_started(const TemporaryFolder& folder) {
  for (const std::string& name : kNames) {
    if (!wait_until([&] { return exists(folder / name); })) return false;
  }
  return true;
}

void expect_all_gone(const TemporaryFolder& folder) {
  for (const std::string& name : kNames) {
    const pid_t pid = pid_in(folder / name);
    EXPECT_TRUE(wait_until([&] { return process_gone(pid); }, 10)) << name;
  }
}

TEST(LaunchOrphan, NoneSurvivesAKilledLauncher) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2"}, .actions = family(folder) + std::vector<std::string>{"pause"}});
  ASSERT_TRUE(all_started(folder));
  launched.send(SIGKILL);
  EXPECT_EQ(launched.wait(), -SIGKILL);
  expect_all_gone(folder);
}

TEST(LaunchOrphan, NoneSurvivesAGoodEnd) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2"}, .actions = family(folder)});
  EXPECT_EQ(launched.wait(), 0);
  expect_all_gone(folder);
  EXPECT_THAT(launched.err(), HasSubstr("ended processes that ranks had left behind: launcher_rank"));
}

TEST(LaunchOrphan, NoneSurvivesAFailure) {
  TemporaryFolder folder;
  Launched launched(
      {.flags = {"--num_procs", "2"},
       .actions = family(folder) + std::vector<std::string>{"on", "0", "pause", "until", folder / "rank.0", "raise",
                                                            std::to_string(SIGABRT)}});
  EXPECT_EQ(launched.wait(), 128 + SIGABRT);
  expect_all_gone(folder);
}

TEST(LaunchOrphan, NoneSurvivesAnInterrupt) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "2"}, .actions = family(folder) + std::vector<std::string>{"pause"}});
  ASSERT_TRUE(all_started(folder));
  launched.send(SIGINT);
  EXPECT_EQ(launched.wait(), 128 + SIGINT);
  expect_all_gone(folder);
}

// A ds-launch under another: when the outer one is killed, nothing of the inner one is left.
TEST(LaunchOrphan, NoneSurvivesInANestedLaunch) {
  TemporaryFolder folder;
  Launched launched({.flags = {"--num_procs", "1"},
                     .actions = family(folder) + std::vector<std::string>{"pause"},
                     .program = {DS_LAUNCH, "--num_procs", "2", DS_RANK_PROGRAM}});
  ASSERT_TRUE(all_started(folder));
  launched.send(SIGKILL);
  EXPECT_EQ(launched.wait(), -SIGKILL);
  expect_all_gone(folder);
}

}  // namespace
}  // namespace ds::launcher::testing
