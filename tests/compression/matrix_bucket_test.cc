#include "compression/power_sgd_reduction.h"

#include <gtest/gtest.h>

#include "core/check.h"

namespace ds::compression {
namespace {

const std::vector<ParameterInfo> kInfos = {
    {"conv", {8, 3, 2, 2}, 96}, {"bias", {8}, 8}, {"gain", {4}, 4}, {"thin", {2, 3}, 6}, {"head", {20, 10}, 200}};
const std::vector<Segment> kSegments = {{0, 0, 0, 96}, {1, 0, 96, 8}, {2, 0, 104, 4}, {3, 0, 112, 6}, {4, 0, 128, 200}};

TEST(MatrixBucket, MatricesHaveTheFirstDimensionAsRowsAndTheRestStaysDense) {
  const MatrixBucket bucket = matrices_of(kSegments, kInfos, 336, 2);
  ASSERT_EQ(bucket.matrices.size(), 2U);
  EXPECT_EQ(bucket.matrices[0].offset, 0);
  EXPECT_EQ(bucket.matrices[0].rows, 8);
  EXPECT_EQ(bucket.matrices[0].columns, 12);
  EXPECT_EQ(bucket.matrices[0].rank, 2);
  EXPECT_EQ(bucket.matrices[1].offset, 128);
  ASSERT_EQ(bucket.dense.size(), 2U) << "bias and gain are neighbours; two factors of thin are larger than it";
  EXPECT_EQ(bucket.dense[0].offset, 96);
  EXPECT_EQ(bucket.dense[0].length, 12);
  EXPECT_EQ(bucket.dense[1].offset, 112);
  EXPECT_EQ(bucket.left_numel(), (8 + 20) * 2);
  EXPECT_EQ(bucket.right_numel(), (12 + 10) * 2);
  EXPECT_EQ(bucket.dense_numel(), 18);
}

TEST(MatrixBucket, ARankThatSavesNothingLeavesAllDense) {
  const MatrixBucket bucket = matrices_of(kSegments, kInfos, 336, 64);
  EXPECT_TRUE(bucket.matrices.empty());
  EXPECT_EQ(bucket.dense_numel(), 96 + 12 + 6 + 200);
}

TEST(MatrixBucket, RefusesACutParameter) {
  EXPECT_THROW(matrices_of({{0, 0, 0, 50}}, kInfos, 64, 2), UsageError);
  EXPECT_THROW(matrices_of(kSegments, kInfos, 336, 0), UsageError);
}

}  // namespace
}  // namespace ds::compression
