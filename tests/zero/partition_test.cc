#include "zero/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "core/check.h"

namespace ds::zero {
namespace {

using testing::ElementsAre;
using testing::Pair;

// Names and sizes of a GPT with `layers` blocks of width d.
std::vector<LayoutParameter> gpt(int layers, int64_t d) {
  std::vector<LayoutParameter> result = {{"wte.weight", 256 * d}, {"wpe.weight", 128 * d}};
  for (int i = 0; i < layers; ++i) {
    const std::string block = cat("h.", i, ".");
    result.push_back({block + "ln1.weight", d});
    result.push_back({block + "ln1.bias", d});
    result.push_back({block + "attn.qkv.weight", 3 * d * d});
    result.push_back({block + "attn.qkv.bias", 3 * d});
    result.push_back({block + "attn.proj.weight", d * d});
    result.push_back({block + "attn.proj.bias", d});
    result.push_back({block + "mlp.fc.weight", 4 * d * d});
    result.push_back({block + "mlp.fc.bias", 4 * d});
    result.push_back({block + "mlp.proj.weight", 4 * d * d});
    result.push_back({block + "mlp.proj.bias", d});
  }
  result.push_back({"ln_f.weight", d});
  result.push_back({"ln_f.bias", d});
  return result;
}

// Every parameter once and whole, aligned, in ascending order, and the slices of all ranks join to the bucket.
void expect_complete(const std::vector<LayoutParameter>& parameters, const LayoutOptions& options,
                     const std::vector<BucketLayout>& buckets) {
  std::vector<int> covered(parameters.size(), 0);
  for (const BucketLayout& bucket : buckets) {
    EXPECT_EQ(bucket.numel % (options.world_size * kAlignment), 0);
    EXPECT_EQ(bucket.slice_numel * options.world_size, bucket.numel);
    int64_t position = 0;
    for (const Segment& segment : bucket.segments) {
      const LayoutParameter& parameter = parameters[static_cast<size_t>(segment.parameter)];
      ++covered[static_cast<size_t>(segment.parameter)];
      EXPECT_EQ(segment.length, parameter.numel);
      EXPECT_EQ(segment.parameter_offset, 0);
      EXPECT_EQ(segment.slice_offset % kAlignment, 0);
      EXPECT_GE(segment.slice_offset, position);
      EXPECT_EQ(parameter.group, bucket.group);
      EXPECT_EQ(parameter.dtype, bucket.dtype);
      position = segment.slice_offset + segment.length;
    }
    EXPECT_LE(position, bucket.numel);
    std::vector<int64_t> pieces(parameters.size(), 0);
    for (int rank = 0; rank < options.world_size; ++rank) {
      for (const Segment& piece : slice_segments(bucket, rank)) {
        EXPECT_EQ(piece.parameter_offset, pieces[static_cast<size_t>(piece.parameter)])
            << "pieces come in order, without gaps";
        pieces[static_cast<size_t>(piece.parameter)] += piece.length;
        EXPECT_LE(piece.slice_offset + piece.length, bucket.slice_numel);
      }
    }
    for (const Segment& segment : bucket.segments)
      EXPECT_EQ(pieces[static_cast<size_t>(segment.parameter)], segment.length);
    int64_t padding = 0;
    for (const auto& gap : padding_of(bucket)) padding += gap.second;
    EXPECT_EQ(padding + std::accumulate(pieces.begin(), pieces.end(), int64_t{0}), bucket.numel);
  }
  EXPECT_THAT(covered, testing::Each(1));
}

TEST(Partition, CutsAtModuleBoundaries) {
  const auto parameters = gpt(8, 512);
  const LayoutOptions options{.world_size = 2};
  const auto buckets = lay_out(parameters, options);
  expect_complete(parameters, options, buckets);
  // No block is cut: all parameters of h.i are in one bucket.
  for (const BucketLayout& bucket : buckets) {
    for (const Segment& segment : bucket.segments) {
      const std::string& name = parameters[static_cast<size_t>(segment.parameter)].name;
      if (!name.starts_with("h.")) continue;
      const std::string block = name.substr(0, name.find('.', 2) + 1);
      const auto here = std::count_if(bucket.segments.begin(), bucket.segments.end(), [&](const Segment& other) {
        return parameters[static_cast<size_t>(other.parameter)].name.starts_with(block);
      });
      EXPECT_EQ(here, 10) << name;
    }
  }
  EXPECT_GE(buckets.size(), 4U) << "a model of several blocks has several buckets, else nothing overlaps";
}

TEST(Partition, BucketLimitRangesFromOneParameterToTheWholeModel) {
  const auto parameters = gpt(2, 64);
  LayoutOptions options{.world_size = 3, .max_bucket_elements = 1};
  auto buckets = lay_out(parameters, options);
  expect_complete(parameters, options, buckets);
  EXPECT_EQ(buckets.size(), parameters.size());
  options.max_bucket_elements = options.target_bucket_elements = 1 << 30;
  buckets = lay_out(parameters, options);
  expect_complete(parameters, options, buckets);
  EXPECT_EQ(buckets.size(), 1U);
}

TEST(Partition, AnEighthOfALargeModelMayBeLimited) {
  const auto parameters = gpt(24, 1024);
  LayoutOptions options{.world_size = 2, .max_bucket_elements = 1 << 30};
  const size_t eighths = lay_out(parameters, options).size();
  options.most_target_elements = 1 << 30;
  EXPECT_EQ(lay_out(parameters, options).size(), eighths) << "a limit beyond it changes nothing";
  options.most_target_elements = 16 << 20;  // a block has 12.6 Mi
  const auto buckets = lay_out(parameters, options);
  expect_complete(parameters, options, buckets);
  EXPECT_GE(buckets.size(), 24U);
  for (const BucketLayout& bucket : buckets) {
    if (bucket.segments.size() > 1) {
      EXPECT_LE(bucket.numel, 2 * options.most_target_elements);
    }
  }
  options.target_bucket_elements = 64 << 20;
  EXPECT_LT(lay_out(parameters, options).size(), buckets.size()) << "a target of its own is not limited";
}

TEST(Partition, NeverExceedsTheLimitButForASingleLargerParameter) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<LayoutParameter> parameters;
    const int count = 1 + static_cast<int>(random() % 40);
    for (int i = 0; i < count; ++i) {
      parameters.push_back({cat("m", i / 5, ".p", i), static_cast<int64_t>(random() % 3000),
                            static_cast<int>(random() % 2), static_cast<int>(random() % 2)});
    }
    const LayoutOptions options{.world_size = 1 + static_cast<int>(random() % 5),
                                .max_bucket_elements = 1 + static_cast<int64_t>(random() % 5000),
                                .target_bucket_elements = static_cast<int64_t>(random() % 4000)};
    const auto buckets = lay_out(parameters, options);
    expect_complete(parameters, options, buckets);
    for (const BucketLayout& bucket : buckets) {
      const Segment& last = bucket.segments.back();
      if (bucket.segments.size() > 1) EXPECT_LE(last.slice_offset + last.length, options.max_bucket_elements);
    }
  }
}

TEST(Partition, GroupsAndDtypesNeverShareABucket) {
  const std::vector<LayoutParameter> parameters = {{"a.weight", 100, 0, 0},
                                                   {"a.bias", 10, 1, 0},
                                                   {"b.weight", 100, 0, 0},
                                                   {"b.bias", 10, 1, 0},
                                                   {"c.weight", 8, 0, 1}};
  const LayoutOptions options{.world_size = 2};
  const auto buckets = lay_out(parameters, options);
  expect_complete(parameters, options, buckets);
  EXPECT_EQ(buckets.size(), 3U);
}

TEST(Partition, PaddingIsWhatNoParameterCovers) {
  const std::vector<LayoutParameter> parameters = {{"a", 20}, {"b", 5}};
  const auto buckets = lay_out(parameters, {.world_size = 2});
  ASSERT_EQ(buckets.size(), 1U);
  EXPECT_EQ(buckets[0].numel, 64);
  EXPECT_THAT(padding_of(buckets[0]), ElementsAre(Pair(20, 12), Pair(37, 27)));
  EXPECT_THAT(slice_segments(buckets[0], 1), ElementsAre(Segment{1, 0, 0, 5}));
}

TEST(Partition, RefusesNonsense) {
  EXPECT_THROW(lay_out({}, {.world_size = 0}), UsageError);
  EXPECT_THROW(lay_out({}, {.world_size = 1, .max_bucket_elements = 0}), UsageError);
  EXPECT_TRUE(lay_out({}, {.world_size = 1}).empty());
}

}  // namespace
}  // namespace ds::zero
