#include "core/json/near_miss.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace ds {
namespace {

const std::array<std::string, 7> kKnown = {"gradient_clipping",  "fp16", "bf16", "stage3_param_persistence_threshold",
                                           "data_parallel_size", "amp",  "stage"};

TEST(NearMiss, CountsEdits) {
  EXPECT_EQ(edit_distance("", "abc"), 3U);
  EXPECT_EQ(edit_distance("stage", "stage"), 0U);
  EXPECT_EQ(edit_distance("stgae", "stage"), 1U);  // neighbours swapped
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
}

TEST(NearMiss, FindsSlips) {
  EXPECT_EQ(near_miss("gradient_clipp1ng", kKnown), "gradient_clipping");
  EXPECT_EQ(near_miss("Gradient-Clipping", kKnown), "gradient_clipping");
  EXPECT_EQ(near_miss("stage3_param_persitance_threshold", kKnown), "stage3_param_persistence_threshold");
  EXPECT_EQ(near_miss("stgae", kKnown), "stage");
}

TEST(NearMiss, PrefersTheSameFirstLetter) {
  EXPECT_EQ(near_miss("bp16", kKnown), "bf16");
  EXPECT_EQ(near_miss("fb16", kKnown), "fp16");
}

TEST(NearMiss, StopsCountingWhereItIsEnough) {
  EXPECT_EQ(edit_distance("stage", "stgae", 1), 1U);
  EXPECT_GT(edit_distance("kitten", "sitting", 2), 2U);
  EXPECT_GT(edit_distance("a", std::string(1 << 20, 'a'), 2), 2U);
}

TEST(NearMiss, AnswersForALongWord) { EXPECT_EQ(near_miss(std::string(1 << 20, 'x'), kKnown), std::nullopt); }

TEST(NearMiss, LeavesOtherWordsAlone) {
  EXPECT_EQ(near_miss("pipe-parallel-size", kKnown), std::nullopt);
  EXPECT_EQ(near_miss("map", kKnown), std::nullopt);  // too short to tell
  EXPECT_EQ(near_miss("num_layers", kKnown), std::nullopt);
  EXPECT_EQ(near_miss("", kKnown), std::nullopt);
}

}  // namespace
}  // namespace ds
