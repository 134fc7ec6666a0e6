#include "launcher/command_line/host_list.h"

#include <gmock/gmock.h>

#include <fstream>

#include "core/check.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<Host> kHosts = {
    {.name = "a", .slots = {0, 1, 2, 3}}, {.name = "b", .slots = {0, 1}}, {.name = "c", .slots = {0}}};

std::string hostfile_error(const std::string& text) {
  return test::thrown_by<Error>([&] { parse_hostfile(text, "hosts"); });
}

std::string choice_error(Choice choice, const std::string& text) {
  return test::thrown_by<Error>([&] { choose_hosts(kHosts, choice, text); });
}

TEST(HostList, ReadsAHostfile) {
  EXPECT_EQ(parse_hostfile("# all\n\na slots=4\n  b\tslots=2 # two\r\nc slots=1", "hosts"), kHosts);
  EXPECT_THAT(parse_hostfile("me@10.0.0.1 slots=1\n", "hosts").front().name, "me@10.0.0.1");
}

TEST(HostList, ReadsAListOfHosts) {
  EXPECT_EQ(parse_host_list("a:4,b:2,c:1", "-H"), kHosts);
  for (const char* text : {"a", "a:", "a:0", "a:x", ":2", "a:2,", "a:1,a:1", "-o:1"}) {
    EXPECT_THAT(test::thrown_by<Error>([&] { parse_host_list(text, "-H"); }), HasSubstr("-H: ")) << text;
  }
  EXPECT_TRUE(is_host_list("a:4,b:2"));
  EXPECT_FALSE(is_host_list("hosts"));
  const test::ScratchFolder folder;
  std::ofstream(folder / "a:4") << "a slots=4\n";
  EXPECT_FALSE(is_host_list(folder / "a:4"));
}

TEST(HostList, LimitsTheRanksOfAllHosts) {
  EXPECT_EQ(count_slots(limit_ranks(kHosts, 7, "-np")), 7);
  const std::vector<Host> five = limit_ranks(kHosts, 5, "-np");
  ASSERT_EQ(five.size(), 2U);
  EXPECT_THAT(five[1].slots, ElementsAre(0));
  EXPECT_THAT(test::thrown_by<Error>([] { limit_ranks(kHosts, 8, "-np"); }), HasSubstr("there are only 7 slots"));
}

TEST(HostList, NamesTheLineThatIsWrong) {
  for (const char* line :
       {"a", "a slots=", "a slots=0", "a slots=-1", "a slots=two", "a slots=2 x", "a:2", "slots=2 a"}) {
    EXPECT_THAT(hostfile_error("x slots=1\n#\n" + std::string(line) + "\n"),
                AllOf(HasSubstr("hosts, line 3: expected 'host slots=N'"), HasSubstr(line)));
  }
  EXPECT_THAT(hostfile_error("a slots=1\nb slots=1\na slots=2\n"),
              HasSubstr("hosts, line 3: host 'a' is already in line 1"));
  EXPECT_THAT(hostfile_error("-oProxyCommand slots=1\n"), HasSubstr("expected the name of a host"));
  EXPECT_THAT(hostfile_error("# nothing\n"), HasSubstr("found none"));
  EXPECT_THAT(test::thrown_by<Error>([] { read_hostfile("/no/such/hosts"); }),
              AllOf(HasSubstr("--hostfile /no/such/hosts"), HasSubstr("No such file")));
}

TEST(HostList, ReadsWhatEditorsWrite) {
  EXPECT_EQ(parse_hostfile("\xEF\xBB\xBF"
                           "a slots=4\r\nb slots=2\r\nc slots=1\r\n",
                           "hosts"),
            kHosts);
  EXPECT_THAT(hostfile_error("\"a\" slots=4\n"),
              HasSubstr("hosts, line 1: expected the name of a host without quotes, found \"a\"; remove them"));
}

TEST(HostList, Includes) {
  EXPECT_THAT(choose_hosts(kHosts, Choice::kInclude, "c@a:3,0,3"),
              ElementsAre(Host{.name = "a", .slots = {0, 3}}, Host{.name = "c", .slots = {0}}));
}

// As in DeepSpeed.
TEST(HostList, AHostThatComesTwiceHasTheSlotsOfBoth) {
  EXPECT_THAT(choose_hosts(kHosts, Choice::kInclude, "a:1@a:0,1"), ElementsAre(Host{.name = "a", .slots = {0, 1}}));
  EXPECT_THAT(choose_hosts(kHosts, Choice::kInclude, "b:1@b"), ElementsAre(kHosts[1]));
  EXPECT_THAT(choose_hosts(kHosts, Choice::kExclude, "a:1@b@c@a:0,2"), ElementsAre(Host{.name = "a", .slots = {3}}));
}

TEST(HostList, ChoosesAmongNamesWithUsers) {
  const std::vector<Host> hosts = parse_hostfile("me@a slots=2\nb slots=2\nyou@a slots=2\nme slots=1\n", "hosts");
  EXPECT_THAT(choose_hosts(hosts, Choice::kInclude, "me@a:1@b:0"),
              ElementsAre(Host{.name = "me@a", .slots = {1}}, Host{.name = "b", .slots = {0}}));
  EXPECT_THAT(choose_hosts(hosts, Choice::kInclude, "b@you@a@me"), ElementsAre(hosts[1], hosts[2], hosts[3]));
  EXPECT_THAT(choose_hosts(hosts, Choice::kExclude, "you@a:0@me@a@b"),
              ElementsAre(Host{.name = "you@a", .slots = {1}}, hosts[3]));
  EXPECT_THAT(test::thrown_by<Error>([&] { choose_hosts(hosts, Choice::kInclude, "they@a"); }),
              HasSubstr("there is no host 'they'; the hosts are me@a"));
}

TEST(HostList, Excludes) {
  EXPECT_THAT(choose_hosts(kHosts, Choice::kExclude, "b@a:1,2"),
              ElementsAre(Host{.name = "a", .slots = {0, 3}}, Host{.name = "c", .slots = {0}}));
  EXPECT_THAT(choose_hosts(kHosts, Choice::kExclude, "b:0,1@c"), ElementsAre(kHosts[0]));
}

TEST(HostList, NamesAHostOrSlotThatIsNotThere) {
  EXPECT_THAT(choice_error(Choice::kInclude, "d"),
              AllOf(HasSubstr("--include: there is no host 'd'"), HasSubstr("a, b, c")));
  EXPECT_THAT(choice_error(Choice::kExclude, "b:2"), HasSubstr("--exclude: host 'b' has no slot 2"));
  EXPECT_THAT(choice_error(Choice::kInclude, "b:x"), HasSubstr("found 'x' in 'b:x'"));
  EXPECT_THAT(choice_error(Choice::kInclude, "b:"), HasSubstr("found '' in 'b:'"));
  EXPECT_THAT(choice_error(Choice::kInclude, "a@"), HasSubstr("there is no host ''"));
  EXPECT_THAT(choice_error(Choice::kExclude, "a@b@c"), HasSubstr("no slot is left"));
}

TEST(HostList, LimitsHostsAndSlots) {
  EXPECT_THAT(limit_hosts(kHosts, 2, 1, "--num_gpus"),
              ElementsAre(Host{.name = "a", .slots = {0}}, Host{.name = "b", .slots = {0}}));
  EXPECT_EQ(limit_hosts(kHosts, {}, {}, "--num_gpus"), kHosts);
  EXPECT_EQ(count_slots(kHosts), 7);
  EXPECT_THAT(test::thrown_by<Error>([] { limit_hosts(kHosts, 4, {}, "--num_gpus"); }),
              HasSubstr("--num_nodes 4: there are only 3 hosts"));
  EXPECT_THAT(test::thrown_by<Error>([] { limit_hosts(kHosts, {}, 2, "--num_gpus"); }),
              HasSubstr("--num_gpus 2: host 'c' has only 1 slots"));
}

}  // namespace
}  // namespace ds::launcher
