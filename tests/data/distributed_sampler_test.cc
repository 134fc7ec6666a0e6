#include "data/distributed_sampler.h"
#include "data/permutation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "core/check.h"

namespace ds::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

std::vector<int64_t> values_of(const Permutation& permutation, int64_t size) {
  std::vector<int64_t> result;
  for (int64_t i = 0; i < size; ++i) result.push_back(permutation(i));
  return result;
}

TEST(Permutation, EverySizeIsPermuted) {
  for (int64_t size = 1; size < 300; ++size) {
    std::vector<int64_t> values = values_of(Permutation(42, 3, size), size);
    std::sort(values.begin(), values.end());
    std::vector<int64_t> wanted(static_cast<size_t>(size));
    std::iota(wanted.begin(), wanted.end(), 0);
    ASSERT_EQ(values, wanted) << size;
  }
}

TEST(Permutation, DependsOnSeedAndEpoch) {
  EXPECT_EQ(values_of(Permutation(1, 0, 100), 100), values_of(Permutation(1, 0, 100), 100));
  EXPECT_NE(values_of(Permutation(1, 0, 100), 100), values_of(Permutation(1, 1, 100), 100));
  EXPECT_NE(values_of(Permutation(1, 0, 100), 100), values_of(Permutation(2, 0, 100), 100));
}

// A change of these values makes every saved position mean other samples.
TEST(Permutation, ItsValuesAreFixed) {
  EXPECT_THAT(values_of(Permutation(1234, 0, 10), 10), ElementsAre(9, 8, 1, 3, 5, 7, 2, 6, 0, 4));
  EXPECT_EQ(Permutation(1234, 7, 1'000'000'000'000)(123'456'789), 669020851091);
}

TEST(Permutation, EverySampleIsEquallyLikelyFirst) {
  constexpr int kSize = 10;
  constexpr int kTrials = 20000;
  for (int64_t position : {0, 4, 9}) {
    std::vector<double> counts(kSize);
    for (uint64_t seed = 0; seed < kTrials; ++seed)
      ++counts[static_cast<size_t>(Permutation(seed, 0, kSize)(position))];
    double chi_square = 0;
    for (const double count : counts) chi_square += (count - 2000) * (count - 2000) / 2000;
    EXPECT_LT(chi_square, 27.9) << "9 degrees of freedom: exceeded once in 1000 by chance";
  }
}

// All batches of one epoch, ranks together: result[batch][rank].
std::vector<std::vector<std::vector<int64_t>>> epoch_of(SamplerOptions options) {
  std::vector<std::vector<std::vector<int64_t>>> result;
  for (int rank = 0; rank < options.world_size; ++rank) {
    options.rank = rank;
    DistributedSampler sampler(options);
    size_t batch = 0;
    for (auto indices = sampler.next_batch(); !indices.empty(); indices = sampler.next_batch(), ++batch) {
      result.resize(std::max(result.size(), batch + 1));
      result[batch].push_back(indices);
    }
  }
  return result;
}

TEST(DistributedSampler, DealsAsTorchsSamplerDoes) {
  // torch: indices[rank : total_size : world_size] in batches of batch_size, padded with the first indices.
  const auto epoch = epoch_of({.dataset_size = 11, .batch_size = 2, .world_size = 3, .shuffle = false});
  ASSERT_EQ(epoch.size(), 2U);
  EXPECT_THAT(epoch[0], ElementsAre(ElementsAre(0, 3), ElementsAre(1, 4), ElementsAre(2, 5)));
  EXPECT_THAT(epoch[1], ElementsAre(ElementsAre(6, 9), ElementsAre(7, 10), ElementsAre(8, 0)));
}

TEST(DistributedSampler, AShorterLastBatchIsTheSameOnEveryRank) {
  const auto epoch = epoch_of({.dataset_size = 10, .batch_size = 4, .world_size = 2, .shuffle = false});
  ASSERT_EQ(epoch.size(), 2U);
  EXPECT_THAT(epoch[1], ElementsAre(ElementsAre(8), ElementsAre(9)));
}

TEST(DistributedSampler, DropLastLeavesTheIncompleteBatchOut) {
  const auto epoch =
      epoch_of({.dataset_size = 11, .batch_size = 2, .world_size = 2, .shuffle = false, .drop_last = true});
  ASSERT_EQ(epoch.size(), 2U);
  EXPECT_THAT(epoch[1], ElementsAre(ElementsAre(4, 6), ElementsAre(5, 7)));
}

TEST(DistributedSampler, AnEpochHasEverySampleOnceOnAnyNumberOfRanks) {
  for (int ranks : {1, 2, 3, 4, 7}) {
    std::multiset<int64_t> seen;
    for (const auto& batch : epoch_of({.dataset_size = 84, .batch_size = 3, .world_size = ranks})) {
      for (const auto& indices : batch) seen.insert(indices.begin(), indices.end());
    }
    EXPECT_EQ(seen.size(), 84U) << ranks;
    EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), 84U) << ranks;
  }
}

TEST(DistributedSampler, FewerSamplesThanRanksAreRepeated) {
  const auto epoch = epoch_of({.dataset_size = 2, .batch_size = 1, .world_size = 5, .shuffle = false});
  ASSERT_EQ(epoch.size(), 1U);
  EXPECT_THAT(epoch[0], ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(0), ElementsAre(1), ElementsAre(0)));
}

TEST(DistributedSampler, EpochsAdvanceByThemselvesAndDiffer) {
  DistributedSampler sampler({.dataset_size = 50, .batch_size = 50});
  const auto first = sampler.next_batch();
  EXPECT_THAT(sampler.next_batch(), IsEmpty());
  EXPECT_EQ(sampler.state().epoch, 1);
  const auto second = sampler.next_batch();
  EXPECT_NE(first, second);
  sampler.set_epoch(0);
  EXPECT_EQ(sampler.next_batch(), first);
}

TEST(DistributedSampler, ResumesOnAnotherNumberOfRanksAtTheSameSample) {
  constexpr int64_t kSamples = 60;
  DistributedSampler whole({.dataset_size = kSamples, .batch_size = kSamples});
  const std::vector<int64_t> order = whole.next_batch();

  DistributedSampler two_ranks({.dataset_size = kSamples, .batch_size = 4, .rank = 0, .world_size = 2});
  two_ranks.next_batch();
  two_ranks.next_batch();
  const SamplerState saved = two_ranks.state();
  EXPECT_EQ(saved, (SamplerState{.epoch = 0, .next_sample = 16, .seed = 1234}));

  std::vector<int64_t> rest(kSamples - 16);
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler resumed({.dataset_size = kSamples, .batch_size = 2, .rank = rank, .world_size = 3, .seed = 99});
    resumed.load_state(saved);
    size_t position = static_cast<size_t>(rank);
    for (auto batch = resumed.next_batch(); !batch.empty(); batch = resumed.next_batch()) {
      for (const int64_t index : batch) {
        if (position < rest.size()) rest[position] = index;
        position += 3;
      }
    }
  }
  EXPECT_EQ(rest, std::vector<int64_t>(order.begin() + 16, order.end()));
}

TEST(DistributedSampler, ImpossibleOptionsAndStatesAreRefused) {
  EXPECT_THROW(DistributedSampler({.dataset_size = 0}), UsageError);
  EXPECT_THROW(DistributedSampler({.dataset_size = 4, .batch_size = 0}), UsageError);
  EXPECT_THROW(DistributedSampler({.dataset_size = 4, .rank = 2, .world_size = 2}), UsageError);
  EXPECT_THAT([] { DistributedSampler({.dataset_size = 4, .batch_size = 3, .world_size = 2, .drop_last = true}); },
              ThrowsMessage<UsageError>(HasSubstr("dataloader_drop_last")));
  DistributedSampler sampler({.dataset_size = 4});
  EXPECT_THAT([&] { sampler.load_state({.next_sample = 5}); }, ThrowsMessage<UsageError>(HasSubstr("sample 5")));
}

TEST(DistributedSampler, KnowsWhetherAllBatchesHaveOneSize) {
  for (int64_t size = 1; size <= 40; ++size) {
    for (const int64_t batch : {1, 2, 3, 4}) {
      for (const int world : {1, 2, 3}) {
        for (const bool drop_last : {false, true}) {
          if (drop_last && size < batch * world) continue;
          DistributedSampler sampler(
              {.dataset_size = size, .batch_size = batch, .world_size = world, .drop_last = drop_last});
          std::set<size_t> sizes;
          for (auto indices = sampler.next_batch(); !indices.empty(); indices = sampler.next_batch()) {
            sizes.insert(indices.size());
          }
          EXPECT_EQ(sampler.has_equal_batches(), sizes.size() == 1)
              << size << " samples, " << batch << " x " << world << (drop_last ? ", drop_last" : "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace ds::engine
