#include "tests/support/grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>

namespace ds::test {
namespace {

using testing::ElementsAre;

TEST(Grid, AllCellsAreTheProduct) {
  EXPECT_THAT(all_cells({2, 3}), ElementsAre(ElementsAre(0, 0), ElementsAre(0, 1), ElementsAre(0, 2), ElementsAre(1, 0),
                                             ElementsAre(1, 1), ElementsAre(1, 2)));
}

// Every combination of values of these axes that the whole grid has.
void expect_covered(const std::vector<GridCell>& cells, const std::vector<size_t>& sizes,
                    const std::vector<size_t>& axes) {
  std::set<GridCell> found;
  size_t wanted = 1;
  for (const size_t axis : axes) wanted *= sizes[axis];
  for (const GridCell& cell : cells) {
    GridCell part;
    for (const size_t axis : axes) part.push_back(cell[axis]);
    found.insert(part);
  }
  EXPECT_EQ(found.size(), wanted) << "axes " << testing::PrintToString(axes);
}

TEST(Grid, EveryPairOfValuesIsInASampleOfStrengthTwo) {
  for (const std::vector<size_t>& sizes : {std::vector<size_t>{4, 4, 4, 4}, {7, 3, 4, 2, 2}, {2, 4, 4}, {3, 1, 2}}) {
    const std::vector<GridCell> cells = covering_cells(sizes, 2);
    for (size_t a = 0; a < sizes.size(); ++a) {
      for (size_t b = 0; b < a; ++b) expect_covered(cells, sizes, {b, a});
    }
    EXPECT_TRUE(std::is_sorted(cells.begin(), cells.end()));
    EXPECT_LE(cells.size(), all_cells(sizes).size());
  }
  EXPECT_LT(covering_cells({4, 4, 4, 4}, 2).size(), 32U) << "of 256";
}

TEST(Grid, EveryTripleOfValuesIsInASampleOfStrengthThree) {
  const std::vector<size_t> sizes{7, 3, 4, 2, 2};
  const std::vector<GridCell> cells = covering_cells(sizes, 3);
  for (size_t a = 0; a < sizes.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      for (size_t c = 0; c < b; ++c) expect_covered(cells, sizes, {c, b, a});
    }
  }
  EXPECT_LT(cells.size(), 112U) << "of 336";
}

TEST(Grid, AStrengthOfAllAxesIsTheWholeGrid) {
  EXPECT_EQ(covering_cells({2, 3, 2}, 3), all_cells({2, 3, 2}));
  EXPECT_EQ(covering_cells({2, 3}, 5), all_cells({2, 3}));
}

class GridWish : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* const text = std::getenv("DS_TEST_GRID")) before_ = text;
  }
  void TearDown() override { setenv("DS_TEST_GRID", before_.c_str(), 1); }

 private:
  std::string before_;
};

TEST_F(GridWish, DecidesBetweenSampleAndGrid) {
  const std::vector<std::string> letters{"a", "b", "c"};
  const std::vector<int> numbers{1, 2};
  const std::vector<bool> flags{false, true};
  setenv("DS_TEST_GRID", "", 1);
  EXPECT_TRUE(sample_wanted());
  EXPECT_EQ(grid_sample(2, letters, numbers, flags).size(), 6U);
  setenv("DS_TEST_GRID", "all", 1);
  EXPECT_FALSE(sample_wanted());
  EXPECT_EQ(grid_sample(2, letters, numbers, flags).size(), 12U);
  EXPECT_EQ(grid_sample(2, letters, numbers, flags)[1], std::tuple("a", 1, true));
}

TEST_F(GridWish, PiecesAreTheWholeGridTogether) {
  std::set<GridCell> cells;
  size_t count = 0;
  for (const char* piece : {"0/5", "1/5", "2/5", "3/5", "4/5"}) {
    setenv("DS_TEST_GRID", piece, 1);
    EXPECT_FALSE(whole_grid_wanted());
    EXPECT_FALSE(sample_wanted());
    const std::vector<GridCell> part = wanted_cells({3, 2, 2}, 2);
    EXPECT_LE(part.size(), 3U) << piece;
    cells.insert(part.begin(), part.end());
    count += part.size();
  }
  EXPECT_EQ(count, 12U);
  EXPECT_EQ(cells.size(), 12U);
  setenv("DS_TEST_GRID", "7/9", 1);
  EXPECT_EQ(wanted_cells({2}, 1).size(), 1U) << "a piece of a small grid has a cell too";
}

TEST_F(GridWish, IsRefusedWhenUnknown) {
  for (const char* wish : {"some", "1", "3/3", "1/2/3", "-1/4", "/"}) {
    setenv("DS_TEST_GRID", wish, 1);
    EXPECT_THROW(whole_grid_wanted(), std::invalid_argument) << wish;
  }
}

}  // namespace
}  // namespace ds::test
