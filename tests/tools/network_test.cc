#include "tools/report/network.h"

#include <gmock/gmock.h>

#include <map>

#include "tests/support/scratch_folder.h"

namespace ds::tool::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<Interface> kInterfaces = {
    {.name = "lo", .addresses = {"127.0.0.1"}, .state = "unknown"},
    {.name = "docker0", .addresses = {"172.17.0.1"}, .state = "down"},
    {.name = "eth0", .addresses = {"10.0.0.5", "fe80::1"}, .state = "up"},
    {.name = "eth1", .addresses = {}, .state = "up"},
    {.name = "ib0", .addresses = {"10.1.0.5"}, .state = "up"},
};

Variables variables(const std::map<std::string, std::string>& values) {
  return [values](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

std::vector<std::string> nccl(const std::string& value) {
  return nccl_choice(kInterfaces, variables({{"NCCL_SOCKET_IFNAME", value}})).names;
}

std::vector<Interface> without(const std::string& prefix) {
  std::vector<Interface> left;
  for (const Interface& interface : kInterfaces) {
    if (!interface.name.starts_with(prefix)) left.push_back(interface);
  }
  return left;
}

TEST(NcclChoice, PrefersInfinibandThenWhatIsNeitherDockerNorLoopback) {
  EXPECT_THAT(nccl_choice(kInterfaces, variables({})).names, ElementsAre("ib0"));
  EXPECT_THAT(nccl_choice(without("ib"), variables({})).names, ElementsAre("eth0"));
  EXPECT_THAT(nccl_choice({kInterfaces[0], kInterfaces[1]}, variables({})).names, ElementsAre("docker0"));
  EXPECT_THAT(nccl_choice({kInterfaces[0]}, variables({})).names, ElementsAre("lo"));
  EXPECT_THAT(nccl_choice({}, variables({})).names, IsEmpty());
}

TEST(NcclChoice, ReadsItsVariable) {
  EXPECT_THAT(nccl("eth"), ElementsAre("eth0"));  // eth1 has no address
  EXPECT_THAT(nccl("eth,ib"), ElementsAre("eth0", "ib0"));
  EXPECT_THAT(nccl("=eth"), IsEmpty());
  EXPECT_THAT(nccl("=eth0"), ElementsAre("eth0"));
  EXPECT_THAT(nccl("^docker,lo"), ElementsAre("eth0", "ib0"));
  EXPECT_THAT(nccl("^=ib0"), ElementsAre("lo", "docker0", "eth0"));
}

TEST(GlooChoice, FollowsTheRouteToTheMaster) {
  const auto towards = [](const std::string& host) -> std::string { return host == "node0" ? "10.1.0.5" : "10.0.0.5"; };
  EXPECT_THAT(gloo_choice(kInterfaces, variables({{"MASTER_ADDR", "node0"}}), towards).names, ElementsAre("ib0"));
  const Choice unset = gloo_choice(kInterfaces, variables({}), towards);
  EXPECT_THAT(unset.names, ElementsAre("eth0"));
  EXPECT_THAT(unset.reason, HasSubstr("not set"));
  EXPECT_THAT(gloo_choice(kInterfaces, variables({}), [](const std::string&) { return ""; }).names, IsEmpty());
}

TEST(GlooChoice, TakesWhatItsVariableNames) {
  const auto nowhere = [](const std::string&) { return ""; };
  const Choice choice = gloo_choice(kInterfaces, variables({{"GLOO_SOCKET_IFNAME", "eth0,eth9"}}), nowhere);
  EXPECT_THAT(choice.names, ElementsAre("eth0", "eth9"));
}

TEST(LinkFacts, ComeFromSys) {
  const test::ScratchFolder root;
  root.write("sys/class/net/eth0/operstate", "up\n");
  root.write("sys/class/net/eth0/speed", "25000\n");
  root.write("sys/class/net/eth0/mtu", "9000\n");
  root.write("sys/class/net/veth/speed", "-1\n");
  const Interface fast = link_facts("eth0", root.path());
  EXPECT_EQ(fast.state, "up");
  EXPECT_EQ(fast.mbits, 25000);
  EXPECT_EQ(fast.mtu, 9000);
  EXPECT_EQ(link_facts("veth", root.path()).mbits, std::nullopt);
  EXPECT_EQ(link_facts("absent", root.path()).state, "unknown");
}

TEST(ReadInterfaces, FindsTheLoopback) {
  for (const Interface& interface : read_interfaces()) {
    if (interface.name != "lo") continue;
    EXPECT_THAT(interface.addresses, ::testing::Contains("127.0.0.1"));
    return;
  }
  ADD_FAILURE() << "every network namespace has a loopback";
}

}  // namespace
}  // namespace ds::tool::report
