#include "launcher/machine/core_binding.h"

#include <gmock/gmock.h>
#include <sched.h>

#include <cstdlib>
#include <fstream>

#include "core/check.h"
#include "launcher/command_line/core_list.h"
#include "launcher/machine/cgroup.h"
#include "launcher/ranks/job_plan.h"
#include "tests/support/thrown.h"

namespace ds::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Runs = std::vector<std::vector<int>>;

// Two NUMA nodes, `per_node` physical cores each, two hyper-threads: CPUs 0..2n-1, then their siblings, as Linux
// numbers them.
std::vector<Core> machine(int per_node) {
  std::vector<Core> cores;
  for (int thread = 0; thread < 2; ++thread) {
    for (int node = 0; node < 2; ++node) {
      for (int core = 0; core < per_node; ++core) {
        cores.push_back({.cpu = (thread * 2 + node) * per_node + core, .node = node, .package = node, .core = core});
      }
    }
  }
  return cores;
}

std::string error_of(const std::function<void()>& call) { return test::thrown_by<ConfigError>(call); }

TEST(CoreList, ReadsAndWrites) {
  EXPECT_THAT(parse_core_list("0-1,3"), ElementsAre(0, 1, 3));
  EXPECT_THAT(parse_core_list("8,2"), ElementsAre(8, 2));
  EXPECT_EQ(core_list_text({0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
  for (const char* bad : {"", "a", "1-", "-1", "1,,2", "1,", "0x1", "70000", "1 2"}) {
    EXPECT_THAT(error_of([&] { parse_core_list(bad); }), HasSubstr("expected core numbers")) << bad;
  }
  EXPECT_THAT(error_of([] { parse_core_list("3-1"); }), HasSubstr("write 1-3"));
  EXPECT_THAT(error_of([] { parse_core_list("0-3,2"); }), HasSubstr("core 2 is named twice"));
}

TEST(CoreBinding, SharesPhysicalCoresAndKeepsNodesTogether) {
  EXPECT_EQ(split_cores(machine(4), 2), (Runs{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(split_cores(machine(4), 4), (Runs{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

TEST(CoreBinding, SpreadsWhatDoesNotDivideOverTheNodes) {
  EXPECT_EQ(split_cores(machine(3), 4), (Runs{{0}, {1}, {3}, {4}}));
  EXPECT_EQ(split_cores(machine(4), 3), (Runs{{0, 1}, {2, 3}, {5, 6}}));
}

TEST(CoreBinding, UsesHyperThreadsWhenThereAreMoreRanksThanCores) {
  EXPECT_EQ(split_cores(machine(1), 4), (Runs{{0}, {2}, {1}, {3}}));
  EXPECT_THAT(error_of([] { split_cores(machine(1), 5); }), HasSubstr("5 ranks need a core each"));
}

TEST(CoreBinding, KeepsTheOrderOfAGivenList) {
  EXPECT_EQ(split_core_list({6, 7, 1, 0}, machine(4), 2), (Runs{{6, 7}, {1, 0}}));
  EXPECT_THAT(error_of([] { split_core_list({0, 99}, machine(4), 1); }), HasSubstr("core 99 is not among"));
  EXPECT_THAT(error_of([] { split_core_list({0}, machine(4), 2); }), HasSubstr("the list has 1"));
}

TEST(CoreBinding, FindsTheCoresOfThisProcess) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  const std::vector<Core> cores = allowed_cores();
  EXPECT_EQ(cores.size(), static_cast<size_t>(CPU_COUNT(&set)));
  for (const Core& core : cores) EXPECT_TRUE(CPU_ISSET(core.cpu, &set));
  EXPECT_GE(physical_cores(cores).size(), 1U);
}

class SampleMachine : public ::testing::Test {
 protected:
  SampleMachine() {
    std::string folder = ::testing::TempDir() + "ds_root_XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    root_ = folder;
  }
  ~SampleMachine() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::filesystem::path root_;
};

TEST_F(SampleMachine, ReadsTheQuotaOfVersionTwo) {
  EXPECT_EQ(cpu_quota(root_), 0);
  write("proc/self/cgroup", "0::/job/1\n");
  write("sys/fs/cgroup/job/1/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("sys/fs/cgroup/job/1/cpu.max", "250000 100000\n");
  EXPECT_EQ(cpu_quota(root_), 3);
}

TEST_F(SampleMachine, CountsNoMoreCoresThanTheQuotaPaysFor) {
  EXPECT_EQ(count_local_cores(root_), static_cast<int>(allowed_cores().size()));
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  EXPECT_EQ(count_local_cores(root_), 1);
}

TEST_F(SampleMachine, ReadsTheQuotaOfVersionOne) {
  write("proc/self/cgroup", "4:memory:/m\n1:cpu,cpuacct:/job\n0::/\n");
  write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(cpu_quota(root_), 1);
}

TEST(Cgroup, FindsTheLineOfAController) {
  const std::string text = "9:name=systemd:/s\n4:memory:/m/1\n1:cpu,cpuacct:/c\n0::/unified\n";
  EXPECT_EQ(cgroup_path(text, ""), "/unified");
  EXPECT_EQ(cgroup_path(text, "memory"), "/m/1");
  EXPECT_EQ(cgroup_path(text, "cpuacct"), "/c");
  EXPECT_EQ(cgroup_path(text, "pids"), "");
}

}  // namespace
}  // namespace ds::launcher
