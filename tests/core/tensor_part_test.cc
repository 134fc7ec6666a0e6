// Parts of tensors against an index map: each element of the whole is given to a rank by the definition of a cut, and
// everything else must agree with that.
#include "core/split/tensor_part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "dsengine/errors.h"

namespace ds {
namespace {

using testing::ElementsAre;

using Sizes = std::vector<int64_t>;

int64_t elements_of(const Sizes& sizes) {
  int64_t result = 1;
  for (const int64_t size : sizes) result *= size;
  return result;
}

// By definition: positions of the dimension that each rank has, in the order of its part.
std::vector<Sizes> positions_by_rank(const Cut& cut, int64_t extent, int count) {
  std::vector<Sizes> result(count);
  const bool zigzag = cut.order == PartOrder::kZigzag;
  const int chunks = zigzag ? 2 * count : count;
  int64_t begin = 0;
  for (int64_t repeat = 0; repeat < cut.repeats; ++repeat) {
    for (const int64_t block : cut.blocks.empty() ? Sizes{extent / cut.repeats} : cut.blocks) {
      std::vector<Sizes> chunk(chunks);
      // Units go to chunks in turn: chunk c has its share, and the first have one more.
      const int64_t units = block / cut.grain;
      int64_t position = begin;
      for (int c = 0; c < chunks; ++c) {
        int64_t own = 0;
        for (int64_t unit = c; unit < units; unit += chunks) ++own;
        for (int64_t i = 0; i < own * cut.grain; ++i) chunk[c].push_back(position++);
      }
      for (int rank = 0; rank < count; ++rank) {
        for (const int c : zigzag ? std::vector<int>{rank, chunks - 1 - rank} : std::vector<int>{rank}) {
          result[rank].insert(result[rank].end(), chunk[c].begin(), chunk[c].end());
        }
      }
      begin += block;
    }
  }
  return result;
}

// Flat numbers of the elements of a rank's part, row-major in the part.
Sizes elements_of_part(const Sizes& sizes, int64_t dim, const Sizes& positions) {
  const int64_t inner = elements_of({sizes.begin() + dim + 1, sizes.end()});
  const int64_t outer = elements_of({sizes.begin(), sizes.begin() + dim});
  Sizes result;
  for (int64_t row = 0; row < outer; ++row) {
    for (const int64_t position : positions) {
      for (int64_t i = 0; i < inner; ++i) result.push_back((row * sizes[dim] + position) * inner + i);
    }
  }
  return result;
}

class Cases {
 public:
  explicit Cases(uint32_t seed) : random_(seed) {}
  int64_t number(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  Sizes sizes() {
    Sizes result;
    const int64_t dims = number(1, 4);
    for (int64_t i = 0; i < dims; ++i) result.push_back(number(1, 4) * number(1, 3));
    return result;
  }
  // Of a dimension that is made to fit.
  Cut cut(Sizes& sizes) {
    Cut result{.dim = number(0, static_cast<int64_t>(sizes.size()) - 1), .blocks = {}};
    result.repeats = number(1, 3);
    result.grain = number(1, 3);
    result.order = number(0, 1) == 0 ? PartOrder::kInOrder : PartOrder::kZigzag;
    int64_t extent = 0;
    const int64_t blocks = number(0, 3);
    for (int64_t i = 0; i < std::max<int64_t>(blocks, 1); ++i) {
      result.blocks.push_back(result.grain * number(1, 6));
      extent += result.blocks.back();
    }
    if (blocks == 0) result.blocks.clear();
    sizes[result.dim] = extent * result.repeats;
    return result;
  }
  // Another shape of as many elements.
  Sizes reshape(const Sizes& from) {
    int64_t left = elements_of(from);
    Sizes result;
    while (left > 1 && result.size() < 4) {
      Sizes divisors;
      for (int64_t d = 1; d <= left; ++d) {
        if (left % d == 0) divisors.push_back(d);
      }
      const int64_t size = divisors[number(0, static_cast<int64_t>(divisors.size()) - 1)];
      result.push_back(size);
      left /= size;
    }
    result.push_back(left);
    return result;
  }

 private:
  std::mt19937 random_;
};

TEST(TensorPart, PartsAreThoseOfTheDefinition) {
  Cases cases(1);
  for (int i = 0; i < 3000; ++i) {
    Sizes sizes = cases.sizes();
    const Cut cut = cases.cut(sizes);
    const int count = static_cast<int>(cases.number(1, 5));
    const std::vector<Sizes> positions = positions_by_rank(cut, sizes[cut.dim], count);
    int64_t total = 0;
    for (int rank = 0; rank < count; ++rank) {
      const TensorPart part(sizes, cut, rank, count);
      const Sizes expected = elements_of_part(sizes, cut.dim, positions[rank]);
      ASSERT_EQ(part.numel(), static_cast<int64_t>(expected.size()));
      ASSERT_EQ(part.sizes()[cut.dim], static_cast<int64_t>(positions[rank].size()));
      const int64_t begin = cases.number(0, part.numel());
      const int64_t end = cases.number(begin, part.numel());
      Sizes found;
      part.for_each_run(begin, end, [&](int64_t whole, int64_t own, int64_t length) {
        ASSERT_EQ(own, begin + static_cast<int64_t>(found.size()));
        for (int64_t k = 0; k < length; ++k) found.push_back(whole + k);
      });
      ASSERT_EQ(found, Sizes(expected.begin() + begin, expected.begin() + end));
      total += part.numel();
      // One way of writing it.
      const TensorPart same(sizes, normalized(cut, sizes[cut.dim], count), rank, count);
      ASSERT_EQ(same.sizes(), part.sizes());
      Sizes again;
      same.for_each_run(0, same.numel(), [&](int64_t whole, int64_t /*part*/, int64_t length) {
        for (int64_t k = 0; k < length; ++k) again.push_back(whole + k);
      });
      ASSERT_EQ(again, expected);
    }
    ASSERT_EQ(total, elements_of(sizes));
  }
}

TEST(TensorPart, EvenIsWhatHasEqualPartsOfEachBlock) {
  Cases cases(2);
  for (int i = 0; i < 2000; ++i) {
    Sizes sizes = cases.sizes();
    const Cut cut = cases.cut(sizes);
    const int count = static_cast<int>(cases.number(1, 4));
    bool even = true;
    for (const int64_t block : blocks_of(cut, sizes[cut.dim])) {
      const int chunks = cut.order == PartOrder::kZigzag ? 2 * count : count;
      for (int c = 0; c < chunks; ++c) even = even && chunk_of(block, cut.grain, c, chunks).length * chunks == block;
    }
    ASSERT_EQ(is_even(cut, sizes[cut.dim], count), even);
  }
}

TEST(TensorPart, AReshapedCutGivesEachRankTheSameElements) {
  Cases cases(3);
  int found = 0;
  for (int i = 0; i < 20000; ++i) {
    Sizes from = cases.sizes();
    const Cut cut = cases.cut(from);
    const Sizes to = cases.reshape(from);
    const int count = static_cast<int>(cases.number(1, 4));
    const std::optional<Cut> after = reshaped(cut, from, to, count);
    if (!after) continue;
    ++found;
    ASSERT_EQ(cut_problem(*after, to[after->dim]), "");
    const std::vector<Sizes> before_positions = positions_by_rank(cut, from[cut.dim], count);
    const std::vector<Sizes> after_positions = positions_by_rank(*after, to[after->dim], count);
    for (int rank = 0; rank < count; ++rank) {
      ASSERT_EQ(elements_of_part(to, after->dim, after_positions[rank]),
                elements_of_part(from, cut.dim, before_positions[rank]));
    }
  }
  EXPECT_GT(found, 2000) << "reshapes that keep a cut are among the cases";
}

TEST(TensorPart, ReshapesOfModels) {
  const Cut hidden{.dim = 2, .blocks = {}};
  // [batch, time, heads x size] to heads and back, over 4 ranks.
  EXPECT_EQ(reshaped(hidden, {2, 5, 32}, {2, 5, 8, 4}, 4), (Cut{.dim = 2, .blocks = {}}));
  EXPECT_EQ(reshaped({.dim = 2, .blocks = {}}, {2, 5, 8, 4}, {2, 5, 32}, 4), (Cut{.dim = 2, .blocks = {}}));
  // Rows of scores: the time of each sequence is cut.
  EXPECT_EQ(reshaped({.dim = 1, .blocks = {}}, {3, 8, 10}, {24, 10}, 2), (Cut{.dim = 0, .blocks = {}, .repeats = 3}));
  EXPECT_EQ(reshaped({.dim = 0, .blocks = {}, .repeats = 3}, {24, 10}, {3, 8, 10}, 2), (Cut{.dim = 1, .blocks = {}}));
  // Seven heads over three ranks: whole heads, 3, 2 and 2.
  EXPECT_EQ(reshaped({.dim = 1, .blocks = {}, .grain = 8}, {5, 56}, {5, 7, 8}, 3), (Cut{.dim = 1, .blocks = {}}));
  EXPECT_EQ(reshaped({.dim = 1, .blocks = {}}, {5, 7, 8}, {5, 56}, 3), (Cut{.dim = 1, .blocks = {}, .grain = 8}));
  // A head cut in the middle cannot be kept.
  EXPECT_EQ(reshaped(hidden, {2, 5, 32}, {2, 5, 2, 16}, 4), std::nullopt);
}

TEST(TensorPart, WholeBlocksCanBeTaken) {
  const Cut fused{.dim = 0, .blocks = {16, 4, 4}};
  const auto key = narrowed(fused, 24, {.begin = 16, .length = 4}, 1, 2);
  ASSERT_TRUE(key);
  EXPECT_EQ(key->cut, (Cut{.dim = 0, .blocks = {}}));
  EXPECT_EQ(key->part, (DimRange{.begin = 8, .length = 2}));
  const auto both = narrowed(fused, 24, {.begin = 16, .length = 8}, 0, 2);
  ASSERT_TRUE(both);
  EXPECT_EQ(both->cut, (Cut{.dim = 0, .blocks = {}, .repeats = 2}));
  EXPECT_FALSE(narrowed(fused, 24, {.begin = 12, .length = 8}, 0, 2)) << "ends within a block";
  EXPECT_FALSE(narrowed(fused, 24, {.begin = 16, .length = 0}, 0, 2));
  EXPECT_FALSE(narrowed({.dim = 0, .blocks = {}}, 24, {.begin = 0, .length = 12}, 0, 2));
}

TEST(TensorPart, TakenBlocksAreThoseOfTheDefinition) {
  Cases cases(4);
  int found = 0;
  for (int i = 0; i < 5000; ++i) {
    Sizes sizes = {1};
    const Cut cut = cases.cut(sizes);
    const int count = static_cast<int>(cases.number(1, 4));
    const int64_t begin = cases.number(0, sizes[0] - 1);
    const int64_t length = cases.number(1, sizes[0] - begin);
    const std::vector<Sizes> positions = positions_by_rank(cut, sizes[0], count);
    for (int rank = 0; rank < count; ++rank) {
      const auto taken = narrowed(cut, sizes[0], {.begin = begin, .length = length}, rank, count);
      if (!taken) continue;
      ++found;
      Sizes expected = positions_by_rank(taken->cut, length, count)[rank];
      for (int64_t& position : expected) position += begin;
      const auto first = positions[rank].begin() + taken->part.begin;
      ASSERT_EQ(Sizes(first, first + taken->part.length), expected);
    }
  }
  EXPECT_GT(found, 500);
}

TEST(TensorPart, WhatFitsNotIsSaid) {
  EXPECT_THAT(chunk_of(50257, 1, 1, 2).length, 25128);
  EXPECT_THAT(cut_problem({.dim = 0, .blocks = {4, 4}}, 9), testing::HasSubstr("blocks have 8"));
  EXPECT_THAT(cut_problem({.dim = 0, .blocks = {}, .repeats = 2}, 9), testing::HasSubstr("no 2 equal blocks"));
  EXPECT_THAT(cut_problem({.dim = 0, .blocks = {}, .grain = 4}, 6), testing::HasSubstr("no multiple of the grain"));
  EXPECT_THROW(TensorPart({4}, {.dim = 1, .blocks = {}}, 0, 2), UsageError);
  EXPECT_THROW(TensorPart({4}, {.dim = 0, .blocks = {}}, 2, 2), UsageError);
  EXPECT_THROW(TensorPart({4}, {.dim = 0, .blocks = {3}}, 0, 2), UsageError);
  EXPECT_THAT(TensorPart({6}, {.dim = 0, .blocks = {}, .order = PartOrder::kZigzag}, 0, 2).ranges(),
              ElementsAre(DimRange{.begin = 0, .length = 2}, DimRange{.begin = 5, .length = 1}));
}

}  // namespace
}  // namespace ds
