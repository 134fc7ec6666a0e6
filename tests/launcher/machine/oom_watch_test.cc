#include "launcher/machine/oom_watch.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>

namespace ds::launcher {
namespace {

using ::testing::HasSubstr;

TEST(OomWatch, ReadsCounters) {
  EXPECT_EQ(counter_value("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n", "oom_kill"), 2);
  EXPECT_EQ(counter_value("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", "oom_kill"), 7);
  EXPECT_EQ(counter_value("oom_kill_disable 0\nunder_oom 0\n", "oom_kill"), std::nullopt);  // Linux before 4.13
  EXPECT_EQ(counter_value("", "oom_kill"), std::nullopt);
}

class SampleFiles : public ::testing::Test {
 protected:
  SampleFiles() {
    std::string folder = ::testing::TempDir() + "ds_oom_XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    root_ = folder;
  }
  ~SampleFiles() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::filesystem::path root_;
};

TEST_F(SampleFiles, VersionTwo) {
  write("proc/self/cgroup", "0::/user.slice/job\n");
  write("proc/vmstat", "nr_free_pages 1\noom_kill 5\n");
  write("sys/fs/cgroup/user.slice/job/memory.events", "low 0\noom 1\noom_kill 1\n");
  write("sys/fs/cgroup/user.slice/job/memory.max", "1073741824\n");
  const OomCounters counters = read_oom_counters(root_);
  EXPECT_EQ(counters.group_kills, 1);
  EXPECT_EQ(counters.host_kills, 5);
  EXPECT_EQ(counters.group_limit, 1 << 30);
  write("sys/fs/cgroup/user.slice/job/memory.max", "max\n");
  EXPECT_EQ(read_oom_counters(root_).group_limit, std::nullopt);
}

TEST_F(SampleFiles, VersionTwoInAContainerThatShowsItsOwnGroupAtTheTop) {
  write("proc/self/cgroup", "0::/docker/0123\n");
  write("sys/fs/cgroup/memory.events", "oom_kill 4\n");
  EXPECT_EQ(read_oom_counters(root_).group_kills, 4);
}

TEST_F(SampleFiles, VersionOne) {
  write("proc/self/cgroup", "4:memory:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  const OomCounters counters = read_oom_counters(root_);
  EXPECT_EQ(counters.group_kills, 3);
  EXPECT_EQ(counters.group_limit, std::nullopt);
  EXPECT_EQ(counters.host_kills, std::nullopt);
}

TEST(OomWatch, JudgesByWhatGrew) {
  EXPECT_EQ(oom_verdict({}, {}), "");
  EXPECT_EQ(oom_verdict({.group_kills = 1, .host_kills = 1}, {.group_kills = 1, .host_kills = 1}), "");
  EXPECT_THAT(oom_verdict({.group_kills = 1}, {.group_kills = 2, .group_limit = 3LL << 30}),
              HasSubstr("control group reached its memory limit of 3.0 GiB"));
  EXPECT_THAT(oom_verdict({.host_kills = 1}, {.host_kills = 2}), HasSubstr("the machine ran out of memory"));
}

TEST(OomWatch, WritesBytes) {
  EXPECT_EQ(bytes_text(12 << 20), "12 MiB");
  EXPECT_EQ(bytes_text(5LL << 30), "5.0 GiB");
}

}  // namespace
}  // namespace ds::launcher
