// Layouts beside those of DeepSpeed's classes (sparsity_reference.py), read from sections of a ds_config.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/sparsity_section.h"
#include "core/text.h"
#include "dsengine/config.h"
#include "dsengine/errors.h"
#include "dsengine/sparsity_pattern.h"

namespace ds::ops {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr uint64_t kReferenceSeed = 1234;
constexpr int64_t kReferenceHeads = 4;

SparsityPattern read(const ordered_json& section) {
  const engine::config::DsConfig config =
      engine::config::parse(ordered_json{{"train_micro_batch_size_per_gpu", 1}, {"sparse_attention", section}});
  return engine::config::pattern_of(*config.sparse_attention);
}

std::string bits(const BlockLayout& layout, int64_t head) {
  std::string result;
  for (int64_t row = 0; row < layout.blocks; ++row) {
    for (int64_t column = 0; column < layout.blocks; ++column) result += layout.has(head, row, column) ? '1' : '0';
  }
  return result;
}

TEST(SparsityPattern, LayoutsAreDeepSpeeds) {
  std::ifstream file(DS_SOURCE_DIR "/tests/ops/sparsity_layouts.json");
  const ordered_json cases = ordered_json::parse(file);
  ASSERT_GT(cases.size(), 60U);
  for (const ordered_json& one : cases) {
    const std::string what = cat(one["section"].dump(), ", ", one["blocks"].dump(), " blocks");
    const auto blocks = one["blocks"].get<int64_t>();
    const auto expected = one["layout"].get<std::vector<std::string>>();
    // Any length of as many blocks.
    for (const int64_t length : {16 * blocks, 16 * blocks - 15}) {
      const BlockLayout layout = block_layout(read(one["section"]), kReferenceHeads, length, kReferenceSeed);
      EXPECT_EQ(layout.blocks, blocks) << what;
      for (int64_t head = 0; head < kReferenceHeads; ++head) {
        EXPECT_EQ(bits(layout, head), expected[expected.size() == 1 ? 0 : static_cast<size_t>(head)]) << what;
      }
    }
  }
}

TEST(SparsityPattern, UnidirectionalLayoutsOfPrefixesAreCorners) {
  for (const SparsityMode mode : {SparsityMode::kFixed, SparsityMode::kVariable, SparsityMode::kBigBird,
                                  SparsityMode::kBSLongformer, SparsityMode::kSlidingWindow}) {
    const SparsityPattern pattern{
        .mode = mode, .block = 8, .different_layout_per_head = true, .unidirectional = true, .num_random_blocks = 2};
    const BlockLayout whole = block_layout(pattern, 3, 8 * 23, 7);
    for (int64_t blocks = 1; blocks < 23; ++blocks) {
      const BlockLayout part = block_layout(pattern, 3, 8 * blocks, 7);
      for (int64_t head = 0; head < 3; ++head) {
        for (int64_t row = 0; row < blocks; ++row) {
          EXPECT_TRUE(part.has(head, row, row)) << "each token sees itself";
          for (int64_t column = 0; column < blocks; ++column) {
            ASSERT_EQ(part.has(head, row, column), whole.has(head, row, column)) << blocks << ", " << row;
          }
        }
      }
    }
  }
}

// What the header excepts.
TEST(SparsityPattern, ShortLastWindowsOfOtherPatternsAreNoCorners) {
  const SparsityPattern pattern{.different_layout_per_head = true,
                                .unidirectional = true,
                                .num_global_blocks = 2,
                                .num_different_global_patterns = 2};
  const BlockLayout part = block_layout(pattern, 2, 16 * 5, 7);
  const BlockLayout whole = block_layout(pattern, 2, 16 * 8, 7);
  EXPECT_TRUE(part.has(1, 4, 3));
  EXPECT_FALSE(whole.has(1, 4, 3));
  EXPECT_TRUE(part.causal);
}

TEST(SparsityPattern, SeedsAndHeadsDrawApart) {
  const SparsityPattern pattern{
      .mode = SparsityMode::kBigBird, .different_layout_per_head = true, .num_random_blocks = 3};
  const BlockLayout layout = block_layout(pattern, 2, 16 * 64, 1);
  EXPECT_EQ(layout.heads, 2);
  EXPECT_NE(bits(layout, 0), bits(layout, 1));
  EXPECT_NE(bits(layout, 0), bits(block_layout(pattern, 2, 16 * 64, 2), 0));
  EXPECT_EQ(bits(layout, 0), bits(block_layout(pattern, 5, 16 * 64, 1), 0)) << "heads in all do not matter";
  int64_t drawn = 0;  // beyond window and global blocks; about 3 of 64 in each of 63 rows
  for (int64_t row = 1; row < 64; ++row) {
    for (int64_t column = 1; column < 64; ++column) drawn += std::abs(row - column) > 1 && layout.has(0, row, column);
  }
  EXPECT_NEAR(static_cast<double>(drawn), 3.0 * 63 * 60 / 64, 25);
}

TEST(SparsityPattern, ShortSequencesGetWhatFits) {
  for (const SparsityMode mode : {SparsityMode::kFixed, SparsityMode::kVariable, SparsityMode::kBigBird,
                                  SparsityMode::kBSLongformer, SparsityMode::kSlidingWindow}) {
    const SparsityPattern pattern{.mode = mode,
                                  .num_local_blocks = 8,
                                  .num_global_blocks = 4,
                                  .num_random_blocks = 9,
                                  .local_window_blocks = {8},
                                  .global_block_indices = {7},
                                  .num_sliding_window_blocks = 11};
    EXPECT_EQ(block_layout(pattern, 1, 20, 1).count(), 4) << "all of 2 x 2";
  }
}

TEST(SparsityPattern, WhatFitsNoLayoutIsNamed) {
  const auto refused = [](const ordered_json& section, const std::string& text) {
    EXPECT_THAT([&] { read(section); }, ThrowsMessage<ConfigError>(HasSubstr("sparse_attention." + text)));
  };
  refused({{"mode", "diagonal"}}, "mode");
  refused({{"block", 0}}, "block: expected");
  refused({{"num_local_blocks", 0}}, "num_local_blocks: expected an integer > 0, found 0");
  refused({{"num_local_blocks", 4}, {"num_global_blocks", 3}}, "num_local_blocks: expected a multiple");
  refused({{"attention", "unidirectional"}, {"horizontal_global_attention", true}}, "horizontal_global_attention");
  refused({{"num_different_global_patterns", 2}}, "num_different_global_patterns: expected 1, since");
  refused({{"num_different_global_patterns", 5}, {"different_layout_per_head", true}},
          "num_different_global_patterns: expected at most");
  refused({{"mode", "variable"}, {"local_window_blocks", ordered_json::array()}}, "local_window_blocks");
  refused({{"mode", "variable"}, {"local_window_blocks", {2, 0}}}, "local_window_blocks: expected integers > 0");
  refused({{"mode", "variable"}, {"global_block_end_indices", {2, 3}}}, "global_block_end_indices: expected as many");
  refused({{"mode", "bslongformer"}, {"global_block_indices", {2}}, {"global_block_end_indices", {2}}},
          "global_block_end_indices: expected an end beyond");
  refused({{"mode", "bslongformer"}, {"global_block_indices", {-1}}}, "global_block_indices: expected indices >= 0");
  refused({{"mode", "bigbird"}, {"num_random_blocks", -1}}, "num_random_blocks: expected an integer >= 0");
  EXPECT_EQ(read({{"mode", "bigbird"}, {"num_local_blocks", 5}, {"num_global_blocks", 3}}).num_global_blocks, 3)
      << "the keys of other modes are not compared";
  // Nor are they checked.
  EXPECT_EQ(problem_of({.mode = SparsityMode::kBSLongformer, .num_local_blocks = 0, .num_random_blocks = -1}), "");
  EXPECT_EQ(problem_of({.num_sliding_window_blocks = 0}), "");
  EXPECT_EQ(problem_of({.mode = SparsityMode::kBigBird, .num_global_blocks = 0}), "");
  EXPECT_THAT(problem_of({.mode = SparsityMode::kBigBird, .num_global_blocks = -1}), HasSubstr("integer >= 0"));
}

}  // namespace
}  // namespace ds::ops
