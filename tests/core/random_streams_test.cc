// Named streams: the same everywhere, and without any relation to each other.
#include "core/random_streams.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <cmath>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace ds {
namespace {

at::Tensor drawn(const RandomStream& stream, int64_t count = 4096) {
  at::Generator generator = generator_of(stream);
  return at::empty({count}, at::kDouble).normal_(0, 1, generator);
}

std::vector<RandomStream> neighbours() {
  std::vector<RandomStream> result;
  for (const uint64_t seed : {1, 2}) {
    for (int64_t step = 0; step < 3; ++step) {
      for (int64_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
        for (const char* purpose : {"h.0.dropout", "h.1.dropout"}) {
          for (const std::vector<int64_t>& at : std::vector<std::vector<int64_t>>{{}, {0}, {1}, {0, 1}, {1, 0}}) {
            result.push_back(
                {.seed = seed, .step = step, .micro_batch = micro_batch, .purpose = purpose, .coordinates = at});
          }
        }
      }
    }
  }
  return result;
}

TEST(RandomStreams, AreTheSameInEveryThreadWhateverWasDrawnBefore) {
  const RandomStream stream{.seed = 7, .step = 3, .purpose = "noise", .coordinates = {2}};
  const at::Tensor expected = drawn(stream);
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      static_cast<void>(at::rand({rank + 1}));
      EXPECT_TRUE(at::equal(drawn(stream), expected));
      // Apart, where the rank is among the coordinates.
      EXPECT_FALSE(at::equal(drawn({.seed = 7, .step = 3, .purpose = "noise", .coordinates = {2, rank}}), expected));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// What a run draws must not depend on the version of the library.
TEST(RandomStreams, KeepTheirKeys) {
  EXPECT_EQ(key_of({}), 0x039766D6A804FC25ULL);
  EXPECT_EQ(key_of({.seed = 42, .step = 10, .micro_batch = 1, .purpose = "gate", .coordinates = {1, 2}}),
            0xE8125B16F3C7B2DBULL);
}

TEST(RandomStreams, LeaveTheDefaultGeneratorAlone) {
  torch::manual_seed(5);
  const at::Tensor expected = at::rand({4});
  torch::manual_seed(5);
  static_cast<void>(drawn({.seed = 5}));
  EXPECT_TRUE(at::equal(at::rand({4}), expected));
}

TEST(GeneratorStates, ThatAreTakenUpDrawTheSameNumbersAgain) {
  const std::vector<at::Generator> generators = default_generators(at::kCPU);
  ASSERT_EQ(generators.size(), 1U);
  const at::Tensor state = generator_state(generators.front());
  const at::Tensor drawn_first = at::rand({4});
  EXPECT_FALSE(at::equal(generator_state(generators.front()), state));
  set_generator_state(generators.front(), state);
  EXPECT_TRUE(at::equal(at::rand({4}), drawn_first));
}

TEST(RandomStreams, OfNeighboursHaveUnrelatedKeys) {
  std::set<uint64_t> keys;
  for (const RandomStream& stream : neighbours()) keys.insert(key_of(stream));
  EXPECT_EQ(keys.size(), neighbours().size());
  // Numbers of bits in which the keys of adjacent steps differ: binomial, of mean 32 and variance 16.
  double sum = 0;
  double squares = 0;
  constexpr int64_t kSteps = 20000;
  for (int64_t step = 0; step < kSteps; ++step) {
    const uint64_t difference = key_of({.seed = 1, .step = step}) ^ key_of({.seed = 1, .step = step + 1});
    const double bits = std::popcount(difference);
    sum += bits;
    squares += (bits - 32) * (bits - 32);
  }
  EXPECT_NEAR(sum / kSteps, 32, 5 * 4 / std::sqrt(kSteps));
  EXPECT_NEAR(squares / kSteps, 16, 1);
}

TEST(RandomStreams, OfNeighboursAreUncorrelated) {
  const std::vector<RandomStream> streams = neighbours();
  std::vector<at::Tensor> rows;
  for (const RandomStream& stream : streams) rows.push_back(drawn(stream));
  const at::Tensor all = at::stack(rows);
  const at::Tensor correlations = at::matmul(all, all.t()) / static_cast<double>(all.size(1));
  const at::Tensor others = correlations - at::diag(correlations.diagonal());
  // 120 streams, 7140 pairs: five standard deviations of one pair.
  EXPECT_LT(others.abs().max().item<double>(), 5 / std::sqrt(4096.0));
  EXPECT_LT(all.mean().abs().item<double>(), 5 / std::sqrt(4096.0 * 120));
}

}  // namespace
}  // namespace ds
