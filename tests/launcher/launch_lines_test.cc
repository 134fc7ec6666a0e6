// Lines as other launchers' pages print them, started for real: node ranks by arrival at an endpoint, counts of
// accelerate and horovodrun, torchrun's variables.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/text.h"
#include "tests/launcher/launched.h"

namespace ds::launcher::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Free a moment ago.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* where = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(fd, where, size), 0);
  EXPECT_EQ(getsockname(fd, where, &size), 0);
  close(fd);
  return ntohs(address.sin_port);
}

const std::vector<std::string> kPlace = {"env", "RANK",       "env", "LOCAL_RANK", "env", "WORLD_SIZE",
                                         "env", "CROSS_RANK", "env", "CROSS_SIZE", "env", "MASTER_PORT"};

// "NAME=value" of all lines, without what stands in front of them.
std::multiset<std::string> entries_of(const std::string& out) {
  std::multiset<std::string> entries;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    const size_t prefix = line.find("] ");
    entries.insert(prefix == std::string::npos ? line : line.substr(prefix + 2));
  }
  return entries;
}

// Of the first one that begins so.
std::string value_of(const std::multiset<std::string>& entries, const std::string& name) {
  const auto found = entries.lower_bound(name + "=");
  return found == entries.end() || !found->starts_with(name + "=") ? "none" : found->substr(name.size() + 1);
}

std::vector<std::string> torchrun_line(int port, const std::string& nodes, const std::string& ranks,
                                       const std::string& id = "100") {
  return {"--nnodes=" + nodes, "--nproc-per-node=" + ranks, "--rdzv-id=" + id, "--rdzv-backend=c10d",
          cat("--rdzv-endpoint=localhost:", port)};
}

TEST(LaunchLines, NodesThatStartTheSameLineGetRanksByArrival) {
  const int port = free_port();
  std::vector<std::unique_ptr<Launched>> nodes;
  for (int node = 0; node < 3; ++node) {
    nodes.push_back(
        std::make_unique<Launched>(Launched::Settings{.flags = torchrun_line(port, "3", "2"), .actions = kPlace}));
  }
  std::vector<int> seen(3, 0);
  std::string master_port;
  for (const auto& node : nodes) {
    ASSERT_EQ(node->wait(), 0) << node->err();
    const std::multiset<std::string> entries = entries_of(node->out());
    const std::string place = value_of(entries, "CROSS_RANK");
    ASSERT_TRUE(place == "0" || place == "1" || place == "2") << node->out();
    ++seen[static_cast<size_t>(std::stoi(place))];
    const int first = 2 * std::stoi(place);
    for (const std::string& entry :
         {cat("RANK=", first), cat("RANK=", first + 1), std::string("LOCAL_RANK=0"), std::string("LOCAL_RANK=1")}) {
      EXPECT_EQ(entries.count(entry), 1U) << entry << " in " << node->out();
    }
    EXPECT_EQ(entries.count("WORLD_SIZE=6"), 2U);
    EXPECT_EQ(entries.count("CROSS_SIZE=3"), 2U);
    if (master_port.empty()) master_port = value_of(entries, "MASTER_PORT");
    EXPECT_EQ(entries.count("MASTER_PORT=" + master_port), 2U);
  }
  EXPECT_EQ(seen, std::vector<int>({1, 1, 1}));
}

TEST(LaunchLines, NodesMayHaveRanksOfTheirOwnNumber) {
  const int port = free_port();
  Launched one({.flags = torchrun_line(port, "2", "1"), .actions = {"env", "WORLD_SIZE"}});
  Launched three({.flags = torchrun_line(port, "2", "3"), .actions = {"env", "WORLD_SIZE"}});
  ASSERT_EQ(one.wait(), 0) << one.err();
  ASSERT_EQ(three.wait(), 0) << three.err();
  EXPECT_THAT(one.out(), HasSubstr("WORLD_SIZE=4"));
  EXPECT_THAT(three.out(), HasSubstr("WORLD_SIZE=4"));
}

TEST(LaunchLines, NodesThatDisagreeOnTheirNumberAreTold) {
  const int port = free_port();
  Launched two({.flags = torchrun_line(port, "2", "1"), .actions = {"print", "started"}});
  Launched three({.flags = torchrun_line(port, "3", "1"), .actions = {"print", "started"}});
  EXPECT_EQ(two.wait(), 2);
  EXPECT_EQ(three.wait(), 2);
  for (const Launched* node : {&two, &three}) {
    EXPECT_THAT(node->err(), HasSubstr("the nodes do not agree on --nnodes"));
    EXPECT_EQ(node->out(), "");
  }
}

bool is_there(const char* address, int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address, &where.sin_addr);
  const bool there = connect(fd, reinterpret_cast<sockaddr*>(&where), sizeof(where)) == 0;
  close(fd);
  return there;
}

// A name may mean 127.0.1.1 on its own machine, and another address on the others.
TEST(LaunchLines, ANameIsListenedForOnAllInterfacesAnAddressThereAlone) {
  const int by_name = free_port();
  Launched name({.flags = torchrun_line(by_name, "2", "1"), .actions = {"print", "started"}});
  EXPECT_TRUE(wait_until([&] { return is_there("127.0.1.1", by_name); }));
  const int by_address = free_port();
  Launched address({.flags = {"--nnodes=2", "--nproc_per_node=1", cat("--rdzv_endpoint=127.0.0.1:", by_address)},
                    .actions = {"print", "started"}});
  EXPECT_TRUE(wait_until([&] { return is_there("127.0.0.1", by_address); }));
  EXPECT_FALSE(is_there("127.0.1.1", by_address));
}

TEST(LaunchLines, ANameThatIsNotKnownYetIsAskedForAgain) {
  Launched launched(
      {.flags = {"--nnodes=2", "--nproc_per_node=1", "--rdzv_endpoint=not-there.invalid:29400", "--join_timeout=2"},
       .actions = {"print", "started"}});
  EXPECT_EQ(launched.wait(110), 2);
  EXPECT_THAT(launched.err(),
              AllOf(HasSubstr("trying again for up to 2 s (--join_timeout)"),
                    HasSubstr("the name not-there.invalid is not known here"), HasSubstr("within 2 s")));
}

TEST(LaunchLines, AnotherJobIsSentAway) {
  const int port = free_port();
  std::vector<std::string> flags = torchrun_line(port, "2", "1");
  flags.push_back("--join_timeout=6");
  Launched first({.flags = flags, .actions = {"print", "started"}});
  ASSERT_TRUE(wait_until([&] { return is_there("127.0.0.1", port); }));  // it listens
  Launched other({.flags = torchrun_line(port, "2", "1", "another"), .actions = {"print", "started"}});
  EXPECT_EQ(other.wait(), 2);
  EXPECT_THAT(other.err(), AllOf(HasSubstr("has --rdzv_id '100'"), HasSubstr("found 'another'")));
  EXPECT_EQ(first.wait(), 2);
  EXPECT_THAT(first.err(), AllOf(HasSubstr("expected 2 nodes within 6 s"), HasSubstr("found 1")));
}

TEST(LaunchLines, AfterAFailureTheNodesMeetAgain) {
  const int port = free_port();
  std::vector<std::string> flags = torchrun_line(port, "2", "1");
  flags.push_back("--max_restarts=1");
  // The first start of each rank fails.
  const std::vector<std::string> actions = {"start", "0", "exit", "5", "env", "DS_RESTART_COUNT", "env", "WORLD_SIZE"};
  Launched one({.flags = flags, .actions = actions});
  Launched two({.flags = flags, .actions = actions});
  ASSERT_EQ(one.wait(), 0) << one.err();
  ASSERT_EQ(two.wait(), 0) << two.err();
  for (const Launched* node : {&one, &two}) EXPECT_THAT(node->out(), HasSubstr("DS_RESTART_COUNT=1"));
}

TEST(LaunchLines, OneNodeNeedsNoMeeting) {
  Launched launched({.flags = torchrun_line(free_port(), "1", "2"), .actions = {"env", "WORLD_SIZE"}});
  ASSERT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_THAT(launched.out(), HasSubstr("WORLD_SIZE=2"));
}

TEST(LaunchLines, CountsOfAccelerateAndHorovodrun) {
  const std::vector<std::vector<std::string>> lines = {
      {"--num_processes", "3"},
      {"--multi_gpu", "--num_processes=3", "--num_machines=1", "--machine_rank=0", "--main_process_port", "0"},
      {"-np", "3", "-H", "localhost:4"},
      {"-np", "3"}};
  for (std::vector<std::string> line : lines) {
    for (std::string& word : line) {
      if (word == "0") word = std::to_string(free_port());
    }
    Launched launched({.flags = line, .actions = {"env", "WORLD_SIZE"}});
    ASSERT_EQ(launched.wait(), 0) << launched.err();
    EXPECT_THAT(launched.out(), HasSubstr("rank 2] WORLD_SIZE=3"));
  }
  Launched few({.flags = {"-np", "3", "-H", "localhost:2"}, .actions = {"env", "WORLD_SIZE"}});
  EXPECT_EQ(few.wait(), 2);
  EXPECT_THAT(few.err(), HasSubstr("there are only 2 slots"));
}

TEST(LaunchLines, RanksForTheCoresOfTheMachine) {
  Launched cpu({.flags = {"--nproc_per_node=cpu"}, .actions = {"env", "WORLD_SIZE"}});
  ASSERT_EQ(cpu.wait(), 0) << cpu.err();
  EXPECT_THAT(cpu.out(), HasSubstr("WORLD_SIZE="));
  Launched none(
      {.flags = {"--nproc_per_node=gpu"}, .actions = {"env", "WORLD_SIZE"}, .environment = {"CUDA_VISIBLE_DEVICES="}});
  EXPECT_EQ(none.wait(), 2);
  EXPECT_THAT(none.err(), HasSubstr("--nproc_per_node gpu: expected a GPU"));
}

TEST(LaunchLines, TorchrunsVariablesStandForFlags) {
  Launched launched({.actions = {"env", "WORLD_SIZE"}, .environment = {"PET_NPROC_PER_NODE=2", "PET_NNODES=1"}});
  ASSERT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_THAT(launched.out(), HasSubstr("WORLD_SIZE=2"));
  EXPECT_THAT(launched.err(), HasSubstr("--nproc_per_node 2 (PET_NPROC_PER_NODE)"));
  Launched typed(
      {.flags = {"--num_procs", "1"}, .actions = {"env", "WORLD_SIZE"}, .environment = {"PET_NPROC_PER_NODE=2"}});
  ASSERT_EQ(typed.wait(), 0) << typed.err();
  EXPECT_EQ(typed.out(), "WORLD_SIZE=1\n");
}

}  // namespace
}  // namespace ds::launcher::testing
