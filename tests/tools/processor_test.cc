#include "tools/report/processor.h"

#include <gmock/gmock.h>

#include "tests/support/scratch_folder.h"

namespace ds::tool::report {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

std::string x86_cpu(int number, int socket, int core) {
  return "processor\t: " + std::to_string(number) +
         "\nmodel name\t: Some CPU @ 2.0GHz\nphysical id\t: " + std::to_string(socket) +
         "\ncore id\t\t: " + std::to_string(core) + "\nflags\t\t: fpu sse sse4_2 fma avx2 avx512f amx_bf16\n\n";
}

TEST(ParseCpuinfo, CountsSocketsCoresAndThreads) {
  // Two sockets of two cores with two threads each; core numbers repeat on each socket.
  std::string text;
  for (int i = 0; i < 8; ++i) text += x86_cpu(i, i / 4, i / 2 % 2);
  const CpuInfo info = parse_cpuinfo(text);
  EXPECT_EQ(info.model, "Some CPU @ 2.0GHz");
  EXPECT_EQ(info.sockets, 2);
  EXPECT_EQ(info.cores, 4);
  EXPECT_EQ(info.threads, 8);
  EXPECT_THAT(info.vector_flags, ElementsAre("sse4_2", "fma", "avx2", "avx512f", "amx_bf16"));
}

TEST(ParseCpuinfo, ReadsArmToo) {
  const CpuInfo info = parse_cpuinfo("processor\t: 0\nFeatures\t: fp asimd sve bf16\n\nprocessor\t: 1\n");
  EXPECT_EQ(info.threads, 2);
  EXPECT_EQ(info.sockets, 0);
  EXPECT_THAT(info.vector_flags, ElementsAre("asimd", "bf16", "sve"));
}

TEST(NumaNodes, AreReadInOrder) {
  const test::ScratchFolder root;
  const std::string folder = "sys/devices/system/node/";
  root.write(folder + "node10/cpulist", "8-15\n");
  root.write(folder + "node10/meminfo", "Node 10 MemTotal:       2048 kB\nNode 10 MemFree:        1024 kB\n");
  root.write(folder + "node2/cpulist", "\n");
  root.write(folder + "node2/meminfo", "Node 2 MemTotal:        4096 kB\n");
  root.write(folder + "nodes_online/cpulist", "0\n");
  const std::vector<NumaNode> nodes = numa_nodes(root.path());
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[0].number, 2);
  EXPECT_EQ(nodes[0].cpus, "");
  EXPECT_EQ(nodes[0].bytes, 4096 * 1024);
  EXPECT_EQ(nodes[1].number, 10);
  EXPECT_EQ(nodes[1].cpus, "8-15");
  EXPECT_EQ(nodes[1].free_bytes, 1024 * 1024);
}

TEST(VectorTarget, IsTheFirstOfThoseThatRun) {
  ASSERT_THAT(vector_targets(), Not(IsEmpty()));
  EXPECT_EQ(vector_target(), vector_targets().front());
}

TEST(ReadProcessor, FindsThisMachine) {
  const Processor processor = read_processor();
  EXPECT_GE(processor.info.threads, processor.allowed_count);
  EXPECT_GE(processor.allowed_count, 1);
  EXPECT_THAT(to_json(describe(processor))["vector_kernels"]["chosen"].get<std::string>(), Not(IsEmpty()));
}

}  // namespace
}  // namespace ds::tool::report
