#include "tools/report/limits.h"

#include <gmock/gmock.h>

#include "tests/support/scratch_folder.h"

namespace ds::tool::report {
namespace {

constexpr const char* kLimits =
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max stack size            8388608              unlimited            bytes     \n"
    "Max open files            1024                 524288               files     \n"
    "Max locked memory         65536                65536                bytes     \n";

TEST(ParseLimit, ReadsNumbersAndUnlimited) {
  EXPECT_EQ(parse_limit(kLimits, "Max stack size").soft, 8388608);
  EXPECT_EQ(parse_limit(kLimits, "Max stack size").hard, std::nullopt);
  EXPECT_EQ(parse_limit(kLimits, "Max open files").soft, 1024);
  EXPECT_EQ(parse_limit(kLimits, "Max open files").hard, 524288);
  EXPECT_EQ(parse_limit(kLimits, "Max realtime timeout").soft, std::nullopt);
}

TEST(ChosenWord, IsThatInBrackets) {
  EXPECT_EQ(chosen_word("always [madvise] never"), "madvise");
  EXPECT_EQ(chosen_word("always madvise"), "");
  EXPECT_EQ(chosen_word("always [madvise"), "");
}

TEST(ReadLimits, ReadsTheFilesBelowItsRoot) {
  const test::ScratchFolder root;
  root.write("proc/self/limits", kLimits);
  root.write("proc/self/cgroup", "0::/job\n");
  root.write("proc/self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n");
  root.write("proc/meminfo", "MemTotal:  4096 kB\nMemAvailable: 2048 kB\nSwapTotal: 1024 kB\nSwapFree: 512 kB\n");
  root.write("proc/sys/vm/overcommit_memory", "2\n");
  root.write("proc/sys/kernel/yama/ptrace_scope", "1\n");
  root.write("proc/sys/kernel/io_uring_disabled", "0\n");
  root.write("sys/fs/cgroup/job/memory.max", "1048576\n");
  root.write("sys/fs/cgroup/job/memory.current", "524288\n");
  root.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  root.write("sys/class/infiniband/mlx5_0/node_type", "1: CA\n");
  root.write("run/.containerenv", "");
  const Limits limits = read_limits(root.path());
  EXPECT_EQ(limits.locked_memory.soft, 65536);
  EXPECT_FALSE(limits.shm.there);
  EXPECT_EQ(limits.memory.total, 4096 * 1024);
  EXPECT_EQ(limits.memory.swap_free, 512 * 1024);
  EXPECT_EQ(limits.memory.cgroup_limit, 1048576);
  EXPECT_LT(limits.memory.takeable, 1048576 - 524288 + 1);
  EXPECT_EQ(limits.memory.takeable_limit, "/sys/fs/cgroup/job/memory.max");
  EXPECT_EQ(limits.huge_pages, "never");
  EXPECT_EQ(limits.ptrace_scope, 1);
  EXPECT_EQ(limits.uring_disabled, 0);
  EXPECT_EQ(limits.overcommit, 2);
  EXPECT_TRUE(limits.infiniband);
  EXPECT_TRUE(limits.container);
}

TEST(ReadLimits, TakesACgroupWithoutALimitForNone) {
  const test::ScratchFolder root;
  root.write("proc/self/cgroup", "4:memory:/job\n");
  root.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(read_limits(root.path()).memory.cgroup_limit, std::nullopt);
}

TEST(DescribeLimits, HasEveryLimitInJson) {
  Limits limits;
  limits.locked_memory.soft = 65536;
  limits.shm = {.there = true, .bytes = 64 << 20, .free_bytes = 32 << 20};
  limits.uring_refusal = "not permitted";
  const auto json = to_json(describe(limits));
  EXPECT_EQ(json["memlock"]["soft"], 65536);
  EXPECT_TRUE(json["memlock"]["hard"].is_null());
  EXPECT_EQ(json["dev_shm"]["free"], 32 << 20);
  EXPECT_EQ(json["io_uring"]["works"], false);
  EXPECT_EQ(json["io_uring"]["refusal"], "not permitted");
  for (const char* name : {"open_files", "core_file", "stack", "memory", "cgroup_memory", "for_offload", "swap",
                           "overcommit", "huge_pages", "ptrace_scope"}) {
    EXPECT_TRUE(json.contains(name)) << name;
  }
}

}  // namespace
}  // namespace ds::tool::report
