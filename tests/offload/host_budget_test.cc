// What the kernel's files say of the memory that is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "core/check.h"
#include "offload/host_budget.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thrown.h"

namespace ds::offload {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

std::map<std::string, int64_t> by_limit(const std::vector<MemoryRoom>& rooms) {
  std::map<std::string, int64_t> result;
  for (const MemoryRoom& room : rooms) EXPECT_TRUE(result.emplace(room.limit, room.bytes).second) << room.limit;
  return result;
}

std::map<std::string, int64_t> of_host(const test::ScratchFolder& host) {
  return by_limit(host_memory_room(host.path()).of_host);
}

TEST(HostBudget, MemAvailableLessAReserve) {
  const test::ScratchFolder host;
  host.write("proc/meminfo",
             "MemTotal:       16777216 kB\nMemFree:          123456 kB\nMemAvailable:    8388608 kB\n"
             "CommitLimit:     4194304 kB\nCommitted_AS:    1048576 kB\n");
  host.write("proc/sys/vm/overcommit_memory", "0\n");
  EXPECT_THAT(of_host(host), ElementsAre(Pair("MemAvailable of /proc/meminfo", 8 * kGiB - 16 * kGiB / 64)));
}

TEST(HostBudget, TheReserveOfALargeHostIsHalfAGiB) {
  const test::ScratchFolder host;
  host.write("proc/meminfo", "MemTotal: 1073741824 kB\nMemAvailable: 1048576 kB\n");
  EXPECT_THAT(of_host(host), ElementsAre(Pair("MemAvailable of /proc/meminfo", kGiB - 512 * kMiB)));
}

TEST(HostBudget, WithoutOvercommitTheCommitLimitCounts) {
  const test::ScratchFolder host;
  host.write("proc/meminfo",
             "MemTotal: 1048576 kB\nMemAvailable: 1048576 kB\nCommitLimit: 524288 kB\nCommitted_AS: 262144 kB\n");
  host.write("proc/sys/vm/overcommit_memory", "2\n");
  EXPECT_THAT(of_host(host), UnorderedElementsAre(Pair("MemAvailable of /proc/meminfo", kGiB - kGiB / 64),
                                                  Pair(HasSubstr("CommitLimit"), 256 * kMiB - 8 * kMiB)));
}

TEST(HostBudget, EveryGroupAboveLimits) {
  const test::ScratchFolder host;
  host.write("proc/self/mountinfo",
             "23 28 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
             "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 master:1 - cgroup2 cgroup2 rw,nsdelegate\n");
  host.write("proc/self/cgroup", "0::/user.slice/job/task\n");
  host.write("sys/fs/cgroup/user.slice/memory.max", "6442450944\n");  // 6 GiB
  host.write("sys/fs/cgroup/user.slice/memory.current", "5368709120\n");
  host.write("sys/fs/cgroup/user.slice/memory.stat",
             "anon 1073741824\nfile 4294967296\ninactive_file 3221225472\nactive_file 536870912\n");
  host.write("sys/fs/cgroup/user.slice/job/memory.max", "4294967296\n");  // 4 GiB
  host.write("sys/fs/cgroup/user.slice/job/memory.current", "1073741824\n");
  host.write("sys/fs/cgroup/user.slice/job/task/memory.max", "max\n");
  host.write("sys/fs/cgroup/user.slice/job/task/memory.current", "1073741824\n");
  EXPECT_THAT(of_host(host),
              UnorderedElementsAre(
                  Pair("/sys/fs/cgroup/user.slice/memory.max", 6 * kGiB - 96 * kMiB - (5 * kGiB - 3584 * kMiB)),
                  Pair("/sys/fs/cgroup/user.slice/job/memory.max", 4 * kGiB - 64 * kMiB - kGiB)));
}

TEST(HostBudget, OfVersionTwoTheSmallerOfMaxAndHighCounts) {
  const test::ScratchFolder host;
  host.write("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  host.write("proc/self/cgroup", "0::/\n");
  host.write("sys/fs/cgroup/memory.current", "0\n");
  const std::string one = "1073741824\n";
  const std::string two = "2147483648\n";
  const auto limits = [&](const std::string& max, const std::string& high) {
    host.write("sys/fs/cgroup/memory.max", max);
    host.write("sys/fs/cgroup/memory.high", high);
    return of_host(host);
  };
  EXPECT_THAT(limits(two, one), ElementsAre(Pair("/sys/fs/cgroup/memory.high", kGiB - 16 * kMiB)));
  EXPECT_THAT(limits("max\n", one), ElementsAre(Pair("/sys/fs/cgroup/memory.high", kGiB - 16 * kMiB)));
  EXPECT_THAT(limits(one, two), ElementsAre(Pair("/sys/fs/cgroup/memory.max", kGiB - 16 * kMiB)));
  EXPECT_THAT(limits(one, "max\n"), ElementsAre(Pair("/sys/fs/cgroup/memory.max", kGiB - 16 * kMiB)));
  EXPECT_THAT(limits("max\n", "max\n"), IsEmpty());
}

TEST(HostBudget, AContainerSeesItsOwnGroupAsTheTop) {
  const test::ScratchFolder host;
  host.write("proc/self/mountinfo", "35 24 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  host.write("sys/fs/cgroup/memory.max", "1073741824\n");
  host.write("sys/fs/cgroup/memory.current", "2147483648\n");
  for (const char* group : {"0::/\n", "0::/../another\n"}) {
    host.write("proc/self/cgroup", group);
    EXPECT_THAT(of_host(host), ElementsAre(Pair("/sys/fs/cgroup/memory.max", 0))) << group << "never negative";
  }
}

TEST(HostBudget, VersionOneWithTheGroupMountedAsTop) {
  const test::ScratchFolder host;
  host.write("proc/self/mountinfo",
             "32 31 0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
             "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n");
  host.write("proc/self/cgroup", "9:name=systemd:/\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc/job\n0::/\n");
  host.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  host.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "536870912\n");
  host.write("sys/fs/cgroup/memory/memory.stat",
             "inactive_file 1\nactive_file 1\ntotal_inactive_file 134217728\ntotal_active_file 0\n");
  host.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  host.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "536870912\n");
  EXPECT_THAT(of_host(host),
              ElementsAre(Pair("/sys/fs/cgroup/memory/memory.limit_in_bytes", kGiB - 16 * kMiB - 384 * kMiB)));
}

TEST(HostBudget, LimitsOfTheProcess) {
  const test::ScratchFolder host;
  host.write("proc/self/limits",
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max data size             2147483648           unlimited            bytes     \n"
             "Max locked memory         8388608              8388608              bytes     \n"
             "Max address space         4294967296           4294967296           bytes     \n");
  host.write("proc/self/status", "Name:\tx\nVmPeak:\t 9999999 kB\nVmSize:\t 1048576 kB\nVmData:\t  524288 kB\n");
  const HostMemoryRoom room = host_memory_room(host.path());
  EXPECT_THAT(room.of_host, IsEmpty());
  EXPECT_THAT(by_limit(room.of_process), UnorderedElementsAre(Pair("RLIMIT_AS (ulimit -v)", 3 * kGiB),
                                                              Pair("RLIMIT_DATA (ulimit -d)", 3 * kGiB / 2)));
  host.write("proc/self/limits", "Max data size  unlimited  unlimited  bytes\nMax address space  unlimited x bytes\n");
  EXPECT_THAT(host_memory_room(host.path()).of_process, IsEmpty());
}

TEST(HostBudget, ThisHostSaysSomething) {
  const HostMemoryRoom room = host_memory_room();
  ASSERT_THAT(room.of_host, Not(IsEmpty()));
  for (const MemoryRoom& of : room.of_host) EXPECT_GT(of.bytes, 0) << of.limit;
  EXPECT_NO_THROW(require_host_memory(4096, "a page"));
  EXPECT_THROW(require_host_memory(int64_t{1} << 50, "a petabyte"), ConfigError);
}

std::string refusal(const HostMemoryNeed& need, const HostMemoryRoom& room) {
  return test::thrown_by<ConfigError>(
      [&] { require_host_memory(need, "optimizer states (zero_optimization.offload_optimizer)", room); }, "");
}

TEST(HostBudget, RanksOfAHostShareItsLimitsAndHaveTheirOwn) {
  const HostMemoryRoom room{.of_host = {{64 * kGiB, "MemAvailable"}, {40 * kGiB, "memory.max"}},
                            .of_process = {{12 * kGiB, "RLIMIT_DATA"}, {11 * kGiB, "RLIMIT_AS"}}};
  EXPECT_EQ(refusal({10 * kGiB, 40 * kGiB, 4}, room), "") << "exactly what there is";
  EXPECT_THAT(refusal({10 * kGiB, 40 * kGiB + 1, 4}, room),
              AllOf(HasSubstr("optimizer states (zero_optimization.offload_optimizer)"),
                    HasSubstr("needs 10.0 GiB on this rank, 40.0 GiB on all ranks of this host (4)"),
                    HasSubstr("available are 40.0 GiB (memory.max)"), HasSubstr("nvme"), HasSubstr("fewer elements"),
                    HasSubstr("more ranks")));
  EXPECT_EQ(refusal({11 * kGiB, 11 * kGiB, 1}, room), "");
  EXPECT_THAT(refusal({23 * kGiB / 2, 23 * kGiB / 2, 1}, room),
              AllOf(HasSubstr("11.5 GiB in this process"), HasSubstr("11.0 GiB (RLIMIT_AS)")));
  EXPECT_EQ(refusal({1 << 30, int64_t{64} << 30, 64}, {}), "") << "nothing is known of this host";
}

TEST(HostBudget, TheEnvironmentHasTheLastWord) {
  EXPECT_EQ(host_memory_given("4096"), 4096);
  EXPECT_EQ(host_memory_given("200GiB"), 200 * kGiB);
  EXPECT_EQ(host_memory_given("0.5MiB"), kMiB / 2);
  for (const char* wrong : {"", "GiB", "12 GiB", "12GB", "-1", "1e30TiB", "nan"}) {
    EXPECT_THROW(host_memory_given(wrong), ConfigError) << wrong;
  }
  ASSERT_EQ(::setenv("DS_HOST_MEMORY", "3TiB", 1), 0);
  const HostMemoryRoom room = host_memory_room();
  ::unsetenv("DS_HOST_MEMORY");
  ASSERT_EQ(room.of_host.size(), 1);
  EXPECT_EQ(room.of_host[0].bytes, 3 * 1024 * kGiB);
  EXPECT_EQ(room.of_host[0].limit, "DS_HOST_MEMORY");
  EXPECT_THAT(refusal({kGiB, 2 * kGiB, 2}, {.of_host = {{kGiB, "MemAvailable"}}}), HasSubstr("DS_HOST_MEMORY"));
}

TEST(HostBudget, Sizes) {
  EXPECT_EQ(size_text(4096), "4.0 KiB");
  EXPECT_EQ(size_text(kMiB), "1.0 MiB");
  EXPECT_EQ(size_text(31 * kGiB / 10), "3.1 GiB");
}

}  // namespace
}  // namespace ds::offload
