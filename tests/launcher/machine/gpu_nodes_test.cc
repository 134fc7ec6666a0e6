// On folders that look like those of a machine with GPUs.
#include "launcher/machine/accelerators.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace ds::launcher {
namespace {

using ::testing::IsEmpty;
using Nodes = std::vector<std::optional<int>>;
using Runs = std::vector<std::vector<int>>;

class GpuNodes : public ::testing::Test {
 protected:
  GpuNodes() {
    std::string folder = ::testing::TempDir() + "ds_gpu_nodes_XXXXXX";
    root_ = mkdtemp(folder.data());
    add("0000:9b:00.0", "GPU-b2aa", "1\n");
    add("0000:1b:00.0", "GPU-a1aa", "0\n");
    add("0000:ca:00.0", "GPU-b3aa", "-1\n");
  }
  ~GpuNodes() override { std::filesystem::remove_all(root_); }

  void add(const std::string& bus, const std::string& uuid, const std::string& node) {
    write(root_ / "driver" / bus / "information",
          "Model: \t\t NVIDIA H100\nGPU UUID: \t " + uuid + "\nDevice Minor: \t " + std::to_string(minor_) + "\n");
    write(root_ / "dev" / ("nvidia" + std::to_string(minor_++)), "");
    write(root_ / "devices" / bus / "numa_node", node);
  }
  Nodes nodes_of(const GpuList& gpus) const {
    return nodes_of_gpus(gpus, root_ / "driver", root_ / "devices", root_ / "dev");
  }

  std::filesystem::path root_;

 private:
  int minor_ = 0;

  static void write(const std::filesystem::path& path, const std::string& text) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
};

TEST_F(GpuNodes, AreThoseOfTheBus) {
  EXPECT_EQ(nodes_of({"0", "1", "2"}), (Nodes{0, 1, std::nullopt}));
  EXPECT_EQ(nodes_of({"1", "0"}), (Nodes{1, 0}));
  EXPECT_EQ(nodes_of({"GPU-a1aa", "GPU-b2", "GPU-b"}), (Nodes{0, 1, std::nullopt})) << "GPU-b is two of them";
  EXPECT_EQ(nodes_of({"3", "MIG-1", ""}), (Nodes{std::nullopt, std::nullopt, std::nullopt}));
  EXPECT_EQ(nodes_of_gpus({"0"}, root_ / "absent", root_ / "devices"), Nodes{std::nullopt});
}

TEST_F(GpuNodes, NumbersCountOnlyWhereNoGpuIsHidden) {
  std::filesystem::remove(root_ / "dev" / "nvidia1");  // GPU-a1aa: CUDA's 0 is another one now
  EXPECT_EQ(nodes_of({"0", "1"}), (Nodes{std::nullopt, std::nullopt}));
  EXPECT_EQ(nodes_of({"GPU-b2aa"}), Nodes{1}) << "names are not counted";
}

// Four cores on each of two nodes, hyper-threads apart.
std::vector<Core> two_nodes() {
  std::vector<Core> cores;
  for (int cpu = 0; cpu < 8; ++cpu) cores.push_back({.cpu = cpu, .node = cpu % 2, .package = cpu % 2, .core = cpu / 4});
  return cores;
}

TEST(CoresBesideGpus, AreAllThoseOfTheNode) {
  EXPECT_EQ(cores_beside_gpus({0, 1, 1}, two_nodes(), 3), (Runs{{0, 2, 4, 6}, {1, 3, 5, 7}, {1, 3, 5, 7}}));
  EXPECT_EQ(cores_beside_gpus({1, 0}, two_nodes(), 1), (Runs{{1, 3, 5, 7}}));
}

TEST(CoresBesideGpus, RanksOfOneNodeShareItsPhysicalCores) {
  EXPECT_EQ(cores_per_sharing_rank({{0, 2, 4, 6}, {1, 3, 5, 7}}, two_nodes()), 2);
  EXPECT_EQ(cores_per_sharing_rank({{0, 2, 4, 6}, {1, 3, 5, 7}, {1, 3, 5, 7}}, two_nodes()), 1);
  EXPECT_EQ(cores_per_sharing_rank({{0, 2, 4, 6}}, two_nodes()), 2) << "hyper-threads are no cores";
}

TEST(CoresBesideGpus, NothingIsBoundWhereItIsNotKnown) {
  EXPECT_THAT(cores_beside_gpus({0, std::nullopt}, two_nodes(), 2), IsEmpty());
  EXPECT_THAT(cores_beside_gpus({0}, two_nodes(), 2), IsEmpty()) << "ranks share GPUs";
  EXPECT_THAT(cores_beside_gpus({0, 2}, two_nodes(), 2), IsEmpty()) << "no core there";
  const std::vector<Core> one_node{{.cpu = 0}, {.cpu = 1}};
  EXPECT_THAT(cores_beside_gpus({0, 0}, one_node, 2), IsEmpty());
  EXPECT_THAT(cores_beside_gpus({}, two_nodes(), 1), IsEmpty());
}

}  // namespace
}  // namespace ds::launcher
