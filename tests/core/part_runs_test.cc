// Runs found from either side against the walk through the whole part.
#include "core/split/part_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "tests/core/random_cut.h"

namespace ds {
namespace {

using Pairs = std::vector<std::pair<int64_t, int64_t>>;  // an element in the whole, and in the part

// Collects elements, and sees to it that runs ascend on both sides.
TensorPart::Run into(Pairs& pairs) {
  return [&pairs](int64_t whole, int64_t part, int64_t length) {
    ASSERT_GT(length, 0);
    ASSERT_TRUE(pairs.empty() || (pairs.back().first < whole && pairs.back().second < part));
    for (int64_t i = 0; i < length; ++i) pairs.emplace_back(whole + i, part + i);
  };
}

TEST(PartRuns, AreThoseOfTheWalkFromEitherSide) {
  std::mt19937 random(7);
  const auto below = [&](int64_t end) { return std::uniform_int_distribution<int64_t>(0, end)(random); };
  for (int trial = 0; trial < 4000; ++trial) {
    const auto [sizes, cut, count] = test::random_cut(random);
    int64_t numel = 1;
    for (const int64_t size : sizes) numel *= size;
    const int index = static_cast<int>(below(count - 1));
    const TensorPart part(sizes, cut, index, count);
    const PartRuns runs(part);
    ASSERT_EQ(runs.numel(), part.numel());
    Pairs all;
    part.for_each_run(0, part.numel(), into(all));
    const int64_t begin = below(part.numel());
    const int64_t end = begin + below(part.numel() - begin);
    Pairs found;
    runs.in_part(begin, end, into(found));
    ASSERT_EQ(found, Pairs(all.begin() + begin, all.begin() + end)) << "trial " << trial;

    const int64_t first = below(numel);
    const int64_t last = first + below(numel - first);
    Pairs wanted;
    std::copy_if(all.begin(), all.end(), std::back_inserter(wanted), [&, first = first, last = last](const auto& pair) {
      return pair.first >= first && pair.first < last;
    });
    found.clear();
    runs.in_whole(first, last, into(found));
    ASSERT_EQ(found, wanted) << "trial " << trial;
  }
}

// Neighbouring blocks of a part are one run where the whole has them together.
TEST(PartRuns, OneRankHasOneRun) {
  const PartRuns runs(TensorPart({4, 12, 3}, {.dim = 1, .blocks = {4, 2}, .repeats = 2}, 0, 1));
  int calls = 0;
  runs.in_part(0, 36, [&](int64_t, int64_t, int64_t length) {
    EXPECT_EQ(length, 36);
    ++calls;
  });
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace ds
