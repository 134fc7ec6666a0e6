#include "launcher/hosts/host_choice.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "core/check.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Optional;
using ::testing::SizeIs;
using Mode = HostChoice::Mode;

constexpr char kNoHostfile[] = "/no/such/hostfile";

HostChoice choose(std::vector<std::string> flags, const std::string& default_hostfile = kNoHostfile) {
  flags.emplace_back("program");
  return choose_where(parse_options(flags), 4, default_hostfile);
}

std::string choice_trouble(const std::vector<std::string>& flags) {
  return test::thrown_by<Error>([&] { choose(flags); });
}

TEST(HostChoice, WithoutHostfileItIsThisMachine) {
  EXPECT_EQ(choose({}).mode, Mode::kHere);
  EXPECT_EQ(choose({"--num_procs", "9", "--num_nodes", "1"}).slots, std::nullopt);
  EXPECT_THAT(choose({"--include", "localhost:1,3"}).slots, Optional(ElementsAre(1, 3)));
  EXPECT_THAT(choose({"--exclude", "localhost:0"}).slots, Optional(ElementsAre(1, 2, 3)));
  EXPECT_THAT(choice_trouble({"--include", "other"}), HasSubstr("there is no host 'other'"));
  EXPECT_THAT(choice_trouble({"--num_nodes", "2"}), HasSubstr("--num_nodes 2: which hosts?"));
  EXPECT_THAT(choice_trouble({"--force_multi"}), HasSubstr("--force_multi needs --hostfile"));
}

TEST(HostChoice, AHostfileOfThisMachineNeedsNoSsh) {
  test::ScratchFolder folder;
  char own[256] = "";
  gethostname(own, sizeof(own) - 1);
  for (const std::string& name : {std::string("localhost"), std::string("127.0.0.1"), std::string(own)}) {
    const std::string file = folder.write("hosts", name + " slots=3\n");
    EXPECT_EQ(choose({"--hostfile", file}).mode, Mode::kHere);
    EXPECT_THAT(choose({"--hostfile", file}).slots, Optional(ElementsAre(0, 1, 2)));
    EXPECT_EQ(choose({"--hostfile", file, "--force_multi"}).mode, Mode::kSsh);
  }
  EXPECT_EQ(choose({"--hostfile", folder.write("hosts", "192.0.2.1 slots=1\n")}).mode, Mode::kSsh);
  EXPECT_EQ(choose({"--hostfile", folder.write("hosts", "me@localhost slots=1\n")}).mode, Mode::kSsh);
}

TEST(HostChoice, TheDefaultHostfileIsUsedWhereThereIsOne) {
  test::ScratchFolder folder;
  const std::string file = folder.write("hosts", "a slots=2\nb slots=2\n");
  const HostChoice choice = choose({"--num_procs", "1"}, file);
  EXPECT_EQ(choice.mode, Mode::kSsh);
  EXPECT_THAT(choice.hosts, ElementsAre(Host{.name = "a", .slots = {0}}, Host{.name = "b", .slots = {0}}));
  EXPECT_THAT(choose({"--include", "b:1"}, file).hosts, ElementsAre(Host{.name = "b", .slots = {1}}));
  EXPECT_EQ(choose({"--standalone"}, file).mode, Mode::kHere);
}

TEST(HostChoice, StartedByHand) {
  test::ScratchFolder folder;
  const std::string file = folder.write("hosts", "a slots=2\nb slots=1\n");
  const HostChoice choice = choose({"--hostfile", file, "--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1"});
  EXPECT_EQ(choice.mode, Mode::kByHand);
  EXPECT_EQ(choice.node, 1);
  EXPECT_THAT(choice.hosts, SizeIs(2));
  const HostChoice as_torchrun =
      choose({"--nnodes", "3", "--nproc_per_node", "2", "--node_rank", "2", "--rdzv_endpoint", "10.0.0.1:1234"});
  EXPECT_EQ(as_torchrun.mode, Mode::kByHand);
  EXPECT_EQ(count_slots(as_torchrun.hosts), 6);
  EXPECT_THAT(choice_trouble({"--hostfile", file, "--node_rank", "2", "--master_addr", "x"}),
              HasSubstr("expected a number from 0 to 1"));
  EXPECT_THAT(choice_trouble({"--hostfile", file, "--node_rank", "0"}), HasSubstr("needs --master_addr"));
  EXPECT_THAT(choice_trouble({"--node_rank", "0", "--num_nodes", "2", "--master_addr", "x"}),
              HasSubstr("how many hosts and ranks"));
}

}  // namespace
}  // namespace ds::launcher
