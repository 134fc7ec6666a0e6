// Grids of ranks whose axes have names.
#include <gmock/gmock.h>

#include "comm/mesh_hosts.h"
#include "core/check.h"
#include "dsengine/device_mesh.h"
#include "dsengine/init_distributed.h"
#include "tests/support/thread_ranks.h"

namespace ds::comm {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The communicator outlives it.
std::shared_ptr<Communicator> shared(Communicator& communicator) { return {std::shared_ptr<void>(), &communicator}; }

// The sum of ranks over a group, which tells its members.
int64_t sum_of_ranks(const std::shared_ptr<Communicator>& group, int rank) {
  const at::Tensor own = at::tensor({int64_t{1} << rank}, at::kLong);
  group->all_reduce(own).wait();
  return own.item<int64_t>();
}

TEST(NamedMesh, AxesHaveTheirGroups) {
  test::run_ranks(8, [](Communicator& world) {
    const NamedMesh mesh = init_device_mesh(shared(world), {2, 4}, {"dp", "tp"});
    const int rank = world.rank();
    EXPECT_THAT(mesh.shape(), ElementsAre(2, 4));
    EXPECT_THAT(mesh.get_coordinate(), ElementsAre(rank / 4, rank % 4));
    EXPECT_EQ(mesh.size(), 8);
    EXPECT_EQ(mesh.size("tp"), 4);
    EXPECT_EQ(mesh["tp"].get_local_rank(), rank % 4);
    EXPECT_EQ(mesh.get_local_rank("dp"), rank / 4);
    EXPECT_EQ(mesh["tp"].get_group()->rank(), rank % 4);
    EXPECT_EQ(sum_of_ranks(mesh.get_group("tp"), rank), rank < 4 ? 0b1111 : 0b11110000);
    EXPECT_EQ(sum_of_ranks(mesh["dp"], rank), 0b10001 << (rank % 4));
    EXPECT_EQ(mesh.text(), "dp 2 x tp 4; on one host");
    EXPECT_EQ(mesh["tp"].text(), "tp 4");
  });
}

TEST(NamedMesh, SeveralAxesAreOneFlatGroup) {
  test::run_ranks(8, [](Communicator& world) {
    const NamedMesh mesh = init_device_mesh(shared(world), {2, 2, 2}, {"dp", "cp", "tp"});
    const int rank = world.rank();
    const NamedMesh both = mesh[{"cp", "dp"}];  // in the mesh's order
    EXPECT_THAT(both.mesh_dim_names(), ElementsAre("dp", "cp"));
    EXPECT_EQ(both.size(), 4);
    EXPECT_EQ(both.get_group()->size(), 4);
    EXPECT_EQ(both.get_group()->rank(), rank / 2);
    EXPECT_EQ(both.get_local_rank(), rank / 2);
    EXPECT_EQ(sum_of_ranks(both, rank), 0b01010101 << (rank % 2));
    EXPECT_EQ(both.get_group(), (mesh[{"dp", "cp"}].get_group()));
    EXPECT_EQ(mesh.get_group()->size(), 8);
    EXPECT_EQ(both["cp"].get_local_rank(), rank / 2 % 2);
    const auto joined = both.joined_with(*mesh.get_group("tp"));
    ASSERT_TRUE(joined.has_value());
    EXPECT_THAT(joined->mesh_dim_names(), ElementsAre("dp", "cp", "tp"));
    EXPECT_EQ(joined->get_group(), mesh.get_group());
    EXPECT_THAT(mesh["tp"].joined_with(*mesh.get_group("dp"))->mesh_dim_names(), ElementsAre("dp", "tp"));
    EXPECT_FALSE(both.joined_with(*mesh.get_group("dp")).has_value());  // its own
    EXPECT_FALSE(both.joined_with(world).has_value());                  // of no axis
    const std::string name = "tp";
    EXPECT_EQ(mesh[name].size(), 2);
    EXPECT_THROW(both["tp"], ConfigError);
  });
}

TEST(NamedMesh, OneRank) {
  test::run_ranks(1, [](Communicator& world) {
    const NamedMesh mesh = init_device_mesh(shared(world), {1, 1}, {"dp", "tp"});
    EXPECT_EQ(mesh["tp"].get_group()->size(), 1);
    EXPECT_EQ(mesh.device_mesh()->layout().text(), "data 1");
    EXPECT_EQ(mesh.text(), "dp 1 x tp 1");
  });
}

TEST(NamedMesh, OfAProcessAlone) {
  const NamedMesh mesh = engine::init_device_mesh("cpu", {1, 1}, {"dp", "tp"});
  EXPECT_EQ(mesh["tp"].get_group()->size(), 1);
  EXPECT_THROW(engine::init_device_mesh("cpu", {2}, {"dp"}), ConfigError);
}

TEST(NamedMesh, IsAGridOfTheEngines) {
  test::run_ranks(8, [](Communicator& world) {
    const NamedMesh mesh = init_device_mesh(shared(world), {2, 2, 2}, {"dp_replicate", "dp_shard", "tp"});
    EXPECT_EQ(mesh.device_mesh()->layout().text(), "data 4 x tensor 2");
    EXPECT_EQ(mesh.device_mesh(), mesh.device_mesh());
    EXPECT_EQ(mesh.device_mesh()->coordinate(MeshAxis::kTensor), mesh.get_local_rank("tp"));
    EXPECT_THROW(mesh["tp"].device_mesh(), ConfigError);
    const auto refusal = [&](const std::vector<int>& shape, const std::vector<std::string>& names) -> std::string {
      const NamedMesh other = init_device_mesh(shared(world), shape, names);
      try {
        other.device_mesh();
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_EQ(refusal({1, 8}, {"tp", "dp"}), "");
    EXPECT_THAT(refusal({2, 4}, {"tp", "dp"}), AllOf(HasSubstr("in the order pipe, data"), HasSubstr("tp, dp")));
    EXPECT_THAT(refusal({2, 4}, {"dp", "model"}), HasSubstr("found 'model'"));
  });
}

TEST(NamedMesh, MistakesAreNamed) {
  test::run_ranks(2, [](Communicator& world) {
    const auto refusal = [&](const std::vector<int>& shape, const std::vector<std::string>& names) -> std::string {
      try {
        init_device_mesh(shared(world), shape, names);
      } catch (const ConfigError& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_THAT(refusal({2}, {"dp", "tp"}), HasSubstr("a name for each of 1 sizes, found 2"));
    EXPECT_THAT(refusal({1, 2}, {"dp", "dp"}), HasSubstr("twice"));
    EXPECT_THAT(refusal({0, 2}, {"dp", "tp"}), AllOf(HasSubstr("axis dp"), HasSubstr("found 0")));
    EXPECT_THAT(refusal({2, 2}, {"dp", "tp"}), AllOf(HasSubstr("multiply to 4"), HasSubstr("2 ranks")));
    const NamedMesh mesh = init_device_mesh(shared(world), {2}, {"dp"});
    try {
      mesh["tp"];
      FAIL() << "accepted";
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("axes dp"), HasSubstr("'tp'")));
    }
  });
}

TEST(MeshHosts, TheInnermostAxisStaysInsideAHost) {
  const GridShape shape{.sizes = {2, 4}};
  const std::vector<std::string> names = {"dp", "tp"};
  const std::vector<int> two = {0, 0, 0, 0, 1, 1, 1, 1};
  EXPECT_EQ(grid_text(shape, names, two), "dp 2 x tp 4; tp inside hosts, dp between them");
  EXPECT_EQ(innermost_problem(shape, names, two), "");
  const std::vector<int> four = {0, 0, 1, 1, 2, 2, 3, 3};
  EXPECT_EQ(grid_text(shape, names, four), "dp 2 x tp 4; dp, tp between hosts");
  EXPECT_THAT(innermost_problem(shape, names, four), AllOf(HasSubstr("axis tp, the innermost"), HasSubstr("found 4")));
  // Axes of one rank send nothing.
  const GridShape flat{.sizes = {8, 1}};
  EXPECT_THAT(innermost_problem(flat, names, four), HasSubstr("axis dp"));
  EXPECT_EQ(innermost_problem({.sizes = {1, 1}}, names, {0}), "");
}

TEST(MeshHosts, NamesTheRanksBetweenWhichAnAxisLeavesAHost) {
  const std::vector<std::string> names = {"a", "a", "a", "b", "b", "b"};
  const std::vector<int> hosts = {0, 0, 0, 1, 1, 1};
  EXPECT_EQ(crossing_text({.sizes = {3, 2}}, 1, hosts, names), "ranks 2 (host a) and 3 (host b)");
  EXPECT_EQ(crossing_text({.sizes = {2, 3}}, 1, hosts, names), "");
  EXPECT_EQ(crossing_text({.sizes = {2, 3}}, 0, hosts, names), "ranks 0 (host a) and 3 (host b)");
}

TEST(MeshHosts, GroupsPartitionTheRanks) {
  const GridShape shape{.sizes = {2, 3, 4}};
  EXPECT_EQ(shape.ranks(), 24);
  for (const std::vector<size_t>& axes : {std::vector<size_t>{0}, {1}, {0, 2}, {0, 1, 2}}) {
    std::vector<int> seen(24);
    for (const auto& group : shape.groups(axes)) {
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      for (const int rank : group) ++seen[static_cast<size_t>(rank)];
    }
    EXPECT_THAT(seen, ::testing::Each(1));
  }
  EXPECT_THAT(shape.groups({2})[1], ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(shape.coordinates(23), ElementsAre(1, 2, 3));
}

}  // namespace
}  // namespace ds::comm
