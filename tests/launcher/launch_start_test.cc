// ds-launch starts ranks: environment, arguments, ports, binding, and refusals before anything runs.
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "core/text.h"
#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A listening socket on a port of the kernel's choice, or on `port`; `port()` is 0 when that was taken.
class Listener {
 public:
  explicit Listener(int port = 0) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* where = reinterpret_cast<sockaddr*>(&address);
    // As the launcher asks: connections that linger from earlier tests do not count. A test beside this one may hold
    // the port for a moment.
    const int on = 1;
    setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    for (int attempt = 0; attempt < 100 && port_ == 0; ++attempt) {
      if (bind(fd_, where, size) == 0 && listen(fd_, 1) == 0 && getsockname(fd_, where, &size) == 0) {
        port_ = ntohs(address.sin_port);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    }
  }
  ~Listener() { close(fd_); }
  int port() const { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

TEST(LaunchStart, SetsTheEnvironmentOfEachRank) {
  Launched three({.flags = {"--num_procs", "3"},
                  .actions = {"env", "RANK", "env", "LOCAL_RANK", "env", "WORLD_SIZE", "env", "LOCAL_SIZE", "env",
                              "LOCAL_WORLD_SIZE", "env", "CROSS_RANK", "env", "CROSS_SIZE", "env", "MASTER_ADDR", "env",
                              "MASTER_PORT"}});
  ASSERT_EQ(three.wait(), 0) << three.err();
  const std::string out = three.out();
  for (int rank = 0; rank < 3; ++rank) {
    const std::string prefix = rank == 0 ? "" : cat("[rank ", rank, "] ");
    for (const std::string& entry :
         std::vector<std::string>{cat("RANK=", rank), cat("LOCAL_RANK=", rank), "WORLD_SIZE=3", "LOCAL_SIZE=3",
                                  "LOCAL_WORLD_SIZE=3", "CROSS_RANK=0", "CROSS_SIZE=1", "MASTER_ADDR=127.0.0.1"}) {
      EXPECT_THAT(cat("\n", out), HasSubstr(cat("\n", prefix, entry, "\n")));
    }
  }
}

TEST(LaunchStart, KeepsAThreadCountThatTheUserHasSet) {
  Launched launched(
      {.flags = {"--num_procs", "1"}, .actions = {"env", "OMP_NUM_THREADS"}, .environment = {"OMP_NUM_THREADS=7"}});
  ASSERT_EQ(launched.wait(), 0);
  EXPECT_EQ(launched.out(), "OMP_NUM_THREADS=7\n");

  Launched unset({.flags = {"--num_procs", "64"}, .actions = {"env", "OMP_NUM_THREADS"}});
  ASSERT_EQ(unset.wait(), 0);
  EXPECT_THAT(unset.out(), HasSubstr("[rank 63] OMP_NUM_THREADS="));
  EXPECT_THAT(unset.out(), Not(HasSubstr("(unset)")));
}

TEST(LaunchStart, PassesArgumentsUntouched) {
  Launched launched(
      {.flags = {"--num_procs", "1", "--"}, .actions = {"print", "--num_procs", "print", "a b", "print", "-q"}});
  ASSERT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(launched.out(), "--num_procs\na b\n-q\n");
}

TEST(LaunchStart, GivesStandardInputToRankZeroAlone) {
  TemporaryFolder folder;
  std::ofstream(folder / "input") << "hello\n";
  Launched launched({.flags = {"--num_procs", "3"}, .actions = {"copy"}, .input = folder / "input"});
  ASSERT_EQ(launched.wait(), 0);
  EXPECT_EQ(launched.out(), "hello\n");
}

TEST(LaunchStart, StartsSixtyFourRanks) {
  Launched launched({.flags = {"--num_procs", "64"}, .actions = {"print", "rank % is here"}});
  ASSERT_EQ(launched.wait(), 0) << launched.err();
  const std::string out = cat("\n", launched.out());
  EXPECT_THAT(out, HasSubstr("\nrank 0 is here\n"));
  for (int rank = 1; rank < 64; ++rank) {
    EXPECT_THAT(out, HasSubstr(cat("\n[rank ", rank, "] rank ", rank, " is here\n")));
  }
}

TEST(LaunchStart, RefusesAGivenPortThatIsInUse) {
  TemporaryFolder folder;
  const Listener listener;
  const std::string port = std::to_string(listener.port());
  Launched launched({.flags = {"--num_procs", "2", "--master_port", port}, .actions = {"touch", folder / "started.%"}});
  EXPECT_EQ(launched.wait(), 2);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr(cat("--master_port ", port)), HasSubstr("in use")));
  EXPECT_FALSE(exists(folder / "started.0"));
}

// As of a ds-launch that has started a shell, in which this one is started.
TEST(LaunchStart, TakesAGivenPortThatAnotherHasButDoesNotUse) {
  Launched outer({.flags = {"--num_procs", "1"}, .actions = {"env", "MASTER_PORT", "pause"}});
  ASSERT_TRUE(wait_until([&] { return outer.out().ends_with("\n"); }));
  const std::string line = outer.out();
  const std::string port = line.substr(line.find('=') + 1, line.size() - line.find('=') - 2);
  Launched inner({.flags = {"--num_procs", "1", "--master_port", port}, .actions = {"env", "MASTER_PORT"}});
  EXPECT_EQ(inner.wait(), 0) << inner.err();
  EXPECT_EQ(inner.out(), line);
}

TEST(LaunchStart, TakesAFreePortWhenTheDefaultIsInUse) {
  const Listener listener(29500);  // when something else has it already, it is in use as well
  Launched launched({.flags = {"--num_procs", "1"}, .actions = {"env", "MASTER_PORT"}});
  ASSERT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_THAT(launched.out(), Not(HasSubstr("MASTER_PORT=29500\n")));
  EXPECT_THAT(launched.err(), HasSubstr("port 29500 is in use"));
}

// Neither of them listens: no rank does.
TEST(LaunchStart, TwoThatStartTogetherGetTwoPorts) {
  TemporaryFolder folder;
  const auto settings = [&](const std::string& name) {
    return Launched::Settings{.flags = {"--num_procs", "1"},
                              .actions = {"env", "MASTER_PORT", "touch", folder / name, "until", folder / "end"}};
  };
  Launched first(settings("first"));
  Launched second(settings("second"));
  ASSERT_TRUE(wait_until([&] { return exists(folder / "first") && exists(folder / "second"); }));
  std::ofstream(folder / "end") << "now";
  EXPECT_EQ(first.wait(), 0);
  EXPECT_EQ(second.wait(), 0);
  EXPECT_THAT(first.out(), HasSubstr("MASTER_PORT="));
  EXPECT_NE(first.out(), second.out());
}

TEST(LaunchStart, RefusesAMasterThatIsAnotherMachine) {
  Launched launched({.flags = {"--master_addr", "192.0.2.1"}, .actions = {}});  // a documentation address
  EXPECT_EQ(launched.wait(), 2);
  EXPECT_THAT(launched.err(), HasSubstr("not an address of this machine"));
}

TEST(LaunchStart, BindsEachRankToItsCores) {
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  int first = 0;
  while (!CPU_ISSET(first, &allowed)) ++first;
  const std::vector<std::string> actions = {"cpus", "env", "OMP_NUM_THREADS"};
  Launched one({.flags = {"--num_procs", "1", "--bind_core_list", std::to_string(first)},
                .actions = actions,
                .environment = {"OMP_NUM_THREADS=9"}});
  ASSERT_EQ(one.wait(), 0) << one.err();
  EXPECT_EQ(one.out(), "cpus=1\nOMP_NUM_THREADS=1\n");

  const std::string too_many = std::to_string(CPU_COUNT(&allowed) + 1);
  Launched refused({.flags = {"--num_procs", too_many, "--bind_cores_to_rank"}, .actions = actions});
  EXPECT_EQ(refused.wait(), 2);
  EXPECT_THAT(refused.err(), HasSubstr(cat("--bind_cores_to_rank: ", too_many, " ranks need a core each")));
}

TEST(LaunchStart, NamesAProgramThatCannotRun) {
  TemporaryFolder folder;
  Launched missing({.flags = {"--num_procs", "2"}, .actions = {}, .program = {"./no_such_program"}});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_THAT(missing.err(), HasSubstr("'./no_such_program' was not found"));

  std::ofstream(folder / "garbage") << std::string(64, '\1');
  std::filesystem::permissions(folder / "garbage", std::filesystem::perms::owner_all);
  Launched garbage({.flags = {"--num_procs", "2"}, .actions = {}, .program = {folder / "garbage"}});
  EXPECT_EQ(garbage.wait(), 126);
  EXPECT_THAT(garbage.err(), HasSubstr("not a binary for this machine"));
}

TEST(LaunchStart, TellsAnUnwritableLogFolderBeforeARankStarts) {
  TemporaryFolder folder;
  std::ofstream(folder / "file");
  Launched launched({.flags = {"--num_procs", "2", "--enable_each_rank_log", folder / "file/logs"},
                     .actions = {"touch", folder / "started.%"}});
  EXPECT_EQ(launched.wait(), 2);
  EXPECT_THAT(launched.err(), AllOf(HasSubstr("--enable_each_rank_log"), HasSubstr("Not a directory")));
  EXPECT_FALSE(exists(folder / "started.0"));
}

TEST(LaunchStart, AnswersHelpAndRefusesUnknownFlags) {
  Launched help({.flags = {"--help"}, .actions = {}, .program = {}});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.out(), AllOf(HasSubstr("--num_procs"), HasSubstr("--bind_core_list")));

  Launched unknown({.flags = {"--num-gpu", "2"}, .actions = {}});
  EXPECT_EQ(unknown.wait(), 2);
  EXPECT_THAT(unknown.err(), HasSubstr("did you mean --num_gpus?"));
}

}  // namespace
}  // namespace ds::launcher::testing
