// What ds-launch shows of the ranks' output.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <regex>
#include <sstream>

#include "core/text.h"
#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LaunchOutput, PrefixesTheLinesOfOtherRanksOnBothStreams) {
  Launched launched({.flags = {"--quiet", "--num_procs", "2"}, .actions = {"print", "out %", "error", "err %"}});
  ASSERT_EQ(launched.wait(), 0);
  EXPECT_THAT(cat("\n", launched.out()), AllOf(HasSubstr("\nout 0\n"), HasSubstr("\n[rank 1] out 1\n")));
  EXPECT_THAT(cat("\n", launched.err()), AllOf(HasSubstr("\nerr 0\n"), HasSubstr("\n[rank 1] err 1\n")));
}

TEST(LaunchOutput, NeverMixesLines) {
  constexpr int kLines = 2000, kLength = 300;
  Launched launched({.flags = {"--quiet", "--num_procs", "4"},
                     .actions = {"lines", std::to_string(kLines), std::to_string(kLength)}});
  ASSERT_EQ(launched.wait(), 0);
  std::istringstream out(launched.out());
  int count[4] = {};
  for (std::string line; std::getline(out, line);) {
    int rank = 0;
    for (int r = 1; r < 4; ++r) {
      const std::string prefix = cat("[rank ", r, "] ");
      if (line.starts_with(prefix)) {
        rank = r;
        line.erase(0, prefix.size());
      }
    }
    ASSERT_EQ(line, std::string(kLength, static_cast<char>('a' + rank)));
    ++count[rank];
  }
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(count[rank], kLines) << "rank " << rank;
}

TEST(LaunchOutput, ShowsALineWithoutAnEnd) {
  Launched launched({.flags = {"--quiet", "--num_procs", "2"}, .actions = {"part", "unfinished %"}});
  ASSERT_EQ(launched.wait(), 0);
  EXPECT_THAT(launched.out(), AllOf(HasSubstr("unfinished 0"), HasSubstr("[rank 1] unfinished 1\n")));
}

TEST(LaunchOutput, WritesALogForEachRank) {
  TemporaryFolder folder;
  const std::string logs = folder / "new/logs";
  Launched launched(
      {.flags = {"--num_procs", "2", "--enable_each_rank_log", logs}, .actions = {"print", "out %", "error", "err %"}});
  ASSERT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_THAT(launched.out(), HasSubstr("[rank 1] out 1\n"));  // and on the console as always
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(logs)) {
    std::smatch match;
    const std::string name = entry.path().filename();
    ASSERT_TRUE(std::regex_match(name, match, std::regex(R"(\d{14}_rank([01])\.log)"))) << name;
    const std::string rank = match[1];
    EXPECT_EQ(read_file(entry.path()), cat("out ", rank, "\nerr ", rank, "\n"));
    ++found;
  }
  EXPECT_EQ(found, 2);
}

// A terminal for ds-launch to write to.
class Terminal {
 public:
  Terminal() : master_(posix_openpt(O_RDWR | O_NOCTTY)) {
    grantpt(master_);
    unlockpt(master_);
    slave_ = open(ptsname(master_), O_RDWR | O_NOCTTY);
  }
  ~Terminal() {
    close(master_);
    close(slave_);
  }
  int slave() const { return slave_; }
  // All that was written so far, and more until it holds `text`; or after a time limit.
  std::string read_until(const std::string& text) {
    wait_until([&] {
      pollfd wait{.fd = master_, .events = POLLIN, .revents = 0};
      char buffer[4096];
      while (poll(&wait, 1, 0) > 0) {
        const ssize_t got = read(master_, buffer, sizeof(buffer));
        if (got <= 0) break;
        seen_.append(buffer, static_cast<size_t>(got));
      }
      return seen_.find(text) != std::string::npos;
    });
    return seen_;
  }

 private:
  int master_, slave_ = -1;
  std::string seen_;
};

TEST(LaunchOutput, RankZeroDrawsOnATerminalWhenDsLaunchDoes) {
  Terminal terminal;
  Launched launched({.flags = {"--quiet", "--num_procs", "2"},
                     .actions = {"tty", "on", "0", "part", "last"},
                     .terminal = terminal.slave()});
  ASSERT_EQ(launched.wait(), 0);
  const std::string seen = terminal.read_until("last");
  EXPECT_THAT(seen, AllOf(HasSubstr("tty=011"), HasSubstr("[rank 1] tty=000")));
}

TEST(LaunchOutput, KeepsTheProgressLineBelowOtherLines) {
  TemporaryFolder folder;
  Terminal terminal;
  Launched drawing({.flags = {"--quiet", "--num_procs", "2"},
                    .actions = {"on", "0", "part", "\\r10 % done", "on", "1", "until", folder / "shown", "on", "1",
                                "print", "news", "until", folder / "over"},
                    .terminal = terminal.slave()});
  terminal.read_until("\r10 0 done");
  std::ofstream(folder / "shown");
  const std::string seen = terminal.read_until("news\r\n10 0 done");
  std::ofstream(folder / "over");
  EXPECT_THAT(seen, HasSubstr("\r10 0 done\r\033[K[rank 1] news\r\n10 0 done"));
  EXPECT_EQ(drawing.wait(), 0);
}

TEST(LaunchOutput, GoesOnWhenNobodyReads) {
  TemporaryFolder folder;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  Launched launched({.flags = {"--num_procs", "2"},
                     .actions = {"until", folder / "closed", "lines", "1000", "100", "touch", folder / "done.%"},
                     .terminal = ends[1]});
  close(ends[1]);
  close(ends[0]);
  std::ofstream(folder / "closed");
  EXPECT_EQ(launched.wait(), 0);
  EXPECT_TRUE(exists(folder / "done.0"));
  EXPECT_TRUE(exists(folder / "done.1"));
}

}  // namespace
}  // namespace ds::launcher::testing
