#include "dsengine/device_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/check.h"

namespace ds::comm {
namespace {

using ::testing::ElementsAre;
using enum MeshAxis;

TEST(MeshLayout, TensorIsTheFastestAxisAndPipeTheSlowest) {
  const MeshLayout layout({.pipe = 2, .data = 2, .tensor = 2});
  EXPECT_THAT(layout.group_of(0, {kTensor}), ElementsAre(0, 1));
  EXPECT_THAT(layout.group_of(0, {kData}), ElementsAre(0, 2));
  EXPECT_THAT(layout.group_of(0, {kPipe}), ElementsAre(0, 4));
  EXPECT_THAT(layout.groups({kData}),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3), ElementsAre(4, 6), ElementsAre(5, 7)));
}

TEST(MeshLayout, CoordinatesAndRanksAreInverse) {
  const MeshLayout layout({.pipe = 2, .data = 3, .expert = 2, .sequence = 2, .tensor = 4});
  EXPECT_EQ(layout.world_size(), 96);
  for (int rank = 0; rank < layout.world_size(); ++rank) EXPECT_EQ(layout.rank_at(layout.coordinates(rank)), rank);
}

TEST(MeshLayout, GroupsPartitionTheRanks) {
  const MeshLayout layout({.pipe = 2, .data = 3, .expert = 2, .tensor = 2});
  for (const std::vector<MeshAxis>& axes : {std::vector{kPipe}, {kData, kExpert}, {kTensor, kData}, {kSequence}}) {
    std::vector<int> seen(layout.world_size());
    for (const auto& group : layout.groups(axes)) {
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      for (const int rank : group) ++seen[rank];
    }
    EXPECT_THAT(seen, ::testing::Each(1));
  }
  EXPECT_EQ(layout.group_name({kExpert, kData}), "data+expert");
}

TEST(MeshLayout, DataTakesTheRest) {
  const MeshLayout layout = MeshLayout::fill_data({.pipe = 2, .tensor = 4}, 24);
  EXPECT_EQ(layout.size(kData), 3);
  EXPECT_EQ(layout.text(), "pipe 2 x data 3 x tensor 4");
}

TEST(MeshLayout, ErrorsNameTheNumbers) {
  EXPECT_THROW(
      {
        try {
          MeshLayout::fill_data({.tensor = 4}, 6);
        } catch (const ConfigError& error) {
          EXPECT_THAT(error.what(),
                      ::testing::AllOf(::testing::HasSubstr("tensor 4"), ::testing::HasSubstr("6 ranks")));
          throw;
        }
      },
      ConfigError);
  EXPECT_THROW(MeshLayout({.pipe = 0}), ConfigError);
  EXPECT_THROW(parse_mesh_axis("model"), ConfigError);
  EXPECT_EQ(parse_mesh_axis("sequence"), kSequence);
}

}  // namespace
}  // namespace ds::comm
