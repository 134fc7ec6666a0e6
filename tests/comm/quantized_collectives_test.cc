// Quantised collectives on ranks as threads: what arrives, how far it is from the exact result, and what was sent.
#include "comm/quantized_collectives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "core/check.h"
#include "tests/comm/reduction_reference.h"
#include "tests/support/borrowed.h"
#include "tests/support/thread_ranks.h"

namespace ds::test {
namespace {

using comm::CollectiveKind;
using comm::Communicator;
using comm::QuantizedReducer;
using comm::ReduceOp;
using comm::Work;

const std::vector<int64_t> kPartLengths = {0, 1, 7, 511, 512, 513, 5003};
const std::vector<at::ScalarType> kFloatTypes = {at::kFloat, at::kBFloat16, at::kHalf};

// run_ranks with a communicator that reducers can hold.
void on_threads(int world, const std::function<void(const std::shared_ptr<Communicator>&)>& body) {
  run_ranks(world, [&](Communicator& communicator) { body(borrowed(communicator)); });
}

at::Tensor decoded(const at::Tensor& values, int bits, at::ScalarType dtype) {
  const BlockCodec codec(bits);
  const at::Tensor encoded = torch::empty({codec.encoded_bytes(values.numel())}, at::kByte);
  codec.encode(values, encoded);
  at::Tensor result = torch::empty(values.sizes(), dtype);
  codec.decode(encoded, result);
  return result;
}

// Half the scale of each value's block.
at::Tensor half_scales(const at::Tensor& largest_by_value, int bits) {
  at::Tensor result = torch::zeros_like(largest_by_value);
  for (int64_t begin = 0; begin < result.numel(); begin += BlockCodec::kBlock) {
    const int64_t count = std::min(BlockCodec::kBlock, result.numel() - begin);
    result.narrow(0, begin, count)
        .fill_(largest_by_value.narrow(0, begin, count).abs().max() / BlockCodec(bits).levels() / 2);
  }
  return result;
}

// Rank `rank`'s part of the exact sum in float64, and the most that a quantised one may differ from it.
std::pair<at::Tensor, at::Tensor> exact_part(int world, int ranks_per_node, int rank, int64_t n, at::ScalarType dtype,
                                             int bits) {
  const bool two_levels = ranks_per_node > 1 && ranks_per_node < world;
  at::Tensor sum = torch::zeros({n}, at::kDouble);
  at::Tensor bound = torch::zeros({n}, at::kDouble);
  for (int node = 0; node < world / ranks_per_node; ++node) {
    at::Tensor node_sum = torch::zeros({n}, at::kDouble);
    at::Tensor node_bound = torch::zeros({n}, at::kDouble);
    for (int place = 0; place < ranks_per_node; ++place) {
      const int source = node * ranks_per_node + place;
      const at::Tensor part = rank_values(n * world, dtype, source).narrow(0, rank * n, n).to(at::kDouble);
      node_sum += part;
      node_bound += half_scales(part, bits);
    }
    if (two_levels) node_bound += half_scales(node_sum.abs() + node_bound, bits);
    sum += node_sum;
    bound += node_bound;
  }
  return {sum, bound * 1.0001 + 1e-6};
}

class QuantizedGather : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(QuantizedGather, EveryRankGetsTheDecodedParts) {
  const auto [world, bits] = GetParam();
  on_threads(world, [world = world, bits = bits](const auto& communicator) {
    for (const at::ScalarType dtype : kFloatTypes) {
      for (const int64_t n : kPartLengths) {
        at::Tensor whole = torch::full({n * world}, 77, dtype);
        const at::Tensor own = rank_values(n, dtype, communicator->rank());
        const Work work = comm::quantized_all_gather(whole, own, bits, *communicator, "weights");
        work.wait();
        EXPECT_TRUE(work.is_completed());
        for (int rank = 0; rank < world; ++rank) {
          const at::Tensor values = rank_values(n, dtype, rank);
          EXPECT_TRUE(torch::equal(whole.narrow(0, rank * n, n), world == 1 ? values : decoded(values, bits, dtype)))
              << dtype << " " << n << " from " << rank;
        }
      }
    }
  });
}

TEST_P(QuantizedGather, TakesItsOwnPartInPlaceAndWritesAnotherType) {
  const auto [world, bits] = GetParam();
  on_threads(world, [world = world, bits = bits](const auto& communicator) {
    const int64_t n = 1001;
    at::Tensor whole = torch::zeros({world, n});
    whole[communicator->rank()] = rank_values(n, at::kFloat, communicator->rank());
    at::Tensor low = torch::zeros({world * n}, at::kBFloat16);
    const Work first = comm::quantized_all_gather(low, whole[communicator->rank()], bits, *communicator, "low");
    const Work second = comm::quantized_all_gather(whole, whole[communicator->rank()], bits, *communicator, "same");
    second.wait();
    first.wait();
    first.wait();  // does nothing
    EXPECT_TRUE(torch::equal(low, whole.view(-1).to(at::kBFloat16)));
    if (world > 1) {
      EXPECT_TRUE(torch::equal(whole[world - 1], decoded(rank_values(n, at::kFloat, world - 1), bits, at::kFloat)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, QuantizedGather,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values(8, 4)));

struct Layout {
  int world;
  int ranks_per_node;
};

class QuantizedReduce : public ::testing::TestWithParam<std::tuple<Layout, int>> {
 protected:
  void on_ranks(const std::function<void(Communicator& world, const QuantizedReducer& reducer)>& body) const {
    const auto [layout, bits] = GetParam();
    on_threads(layout.world, [&, layout = layout, bits = bits](const auto& communicator) {
      const QuantizedReducer reducer = comm::make_quantized_reducer(communicator, layout.ranks_per_node, bits);
      EXPECT_EQ(reducer.size(), layout.world);
      EXPECT_EQ(reducer.rank(), communicator->rank());
      body(*communicator, reducer);
    });
  }
  static Layout layout() { return std::get<0>(GetParam()); }
  static int bits() { return std::get<1>(GetParam()); }
};

TEST_P(QuantizedReduce, EachRankGetsItsPartWithinTheErrorBound) {
  on_ranks([](Communicator& communicator, const QuantizedReducer& reducer) {
    const int world = communicator.size();
    for (const at::ScalarType dtype : kFloatTypes) {
      for (const int64_t n : kPartLengths) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
          at::Tensor input = rank_values(n * world, dtype, communicator.rank());
          at::Tensor part = torch::full({n}, 77, at::kFloat);
          const Work work = reducer.reduce_scatter(part, input, op, "gradients");
          input.fill_(99);  // it has been read
          work.wait();
          EXPECT_TRUE(work.is_completed());
          auto [sum, bound] = exact_part(world, layout().ranks_per_node, communicator.rank(), n, dtype, bits());
          const int divisor = op == ReduceOp::kAvg ? world : 1;
          const at::Tensor error = (part.to(at::kDouble) - sum / divisor).abs();
          EXPECT_TRUE((error <= bound / divisor).all().item<bool>())
              << dtype << " " << n << " " << name_of(op) << ": " << (error - bound).max();
        }
      }
    }
  });
}

TEST_P(QuantizedReduce, OutputMayBeOfAnotherTypeAndLieInTheInput) {
  on_ranks([](Communicator& communicator, const QuantizedReducer& reducer) {
    const int64_t n = 700;
    const int world = communicator.size();
    const at::Tensor input = rank_values(n * world, at::kFloat, communicator.rank());
    at::Tensor wanted = torch::empty({n});
    reducer.reduce_scatter(wanted, input).wait();
    at::Tensor low = torch::empty({n}, at::kHalf);
    const Work first = reducer.reduce_scatter(low, input);
    const at::Tensor in_place = input.narrow(0, communicator.rank() * n, n);
    const Work second = reducer.reduce_scatter(in_place, input);
    first.wait();
    second.wait();
    second.wait();  // does nothing
    EXPECT_TRUE(torch::equal(low, wanted.to(at::kHalf)));
    EXPECT_TRUE(torch::equal(in_place, wanted));
  });
}

TEST_P(QuantizedReduce, OverflowArrivesOnTheRankThatOwnsThePart) {
  on_ranks([](Communicator& communicator, const QuantizedReducer& reducer) {
    const int64_t n = 1300;
    const int world = communicator.size();
    for (int owner = 0; owner < world; ++owner) {
      at::Tensor input = torch::ones({n * world}, at::kHalf);
      if (communicator.rank() == world - 1) input[owner * n + 600] = std::numeric_limits<float>::infinity();
      at::Tensor part = torch::empty({n}, at::kHalf);
      reducer.reduce_scatter(part, input, ReduceOp::kAvg).wait();
      EXPECT_EQ(part[600].isfinite().item<bool>(), communicator.rank() != owner);
      EXPECT_NEAR(part[0].item<float>(), 1.0F, 1e-3);
      EXPECT_NEAR(part[1299].item<float>(), 1.0F, 1e-3);
    }
  });
}

TEST_P(QuantizedReduce, RunsRepeatBitForBit) {
  on_ranks([](Communicator& communicator, const QuantizedReducer& reducer) {
    const at::Tensor input = rank_values(3001 * communicator.size(), at::kBFloat16, communicator.rank());
    at::Tensor first = torch::empty({3001}, at::kBFloat16);
    at::Tensor again = torch::empty({3001}, at::kBFloat16);
    reducer.reduce_scatter(first, input).wait();
    reducer.reduce_scatter(again, input).wait();
    EXPECT_TRUE(torch::equal(first, again));
  });
}

std::string reduce_name(const ::testing::TestParamInfo<std::tuple<Layout, int>>& info) {
  const auto [layout, bits] = info.param;
  return cat(layout.world, "ranks_", layout.ranks_per_node, "pernode_", bits, "bits");
}

INSTANTIATE_TEST_SUITE_P(Layouts, QuantizedReduce,
                         ::testing::Combine(::testing::Values(Layout{1, 1}, Layout{2, 1}, Layout{2, 2}, Layout{3, 3},
                                                              Layout{4, 4}, Layout{4, 2}, Layout{6, 2}, Layout{6, 3}),
                                            ::testing::Values(8, 4)),
                         reduce_name);

TEST(QuantizedCollectives, SendAQuarterAndAnEighthOfTheBytesOfFloat32) {
  constexpr int64_t n = 1 << 16;
  const at::Tensor values = torch::randn({4 * n});  // the generator is shared by all threads
  on_threads(4, [&](const auto& communicator) {
    for (const int bits : {8, 4}) {
      const int64_t bytes = BlockCodec(bits).encoded_bytes(n);
      EXPECT_NEAR(static_cast<double>(bytes) / (4.0 * n), bits / 32.0, 0.002);
      at::Tensor whole = values.clone();
      at::Tensor part = values.narrow(0, 0, n).clone();
      communicator->reset_counters();
      comm::quantized_all_gather(whole, part, bits, *communicator, "weights").wait();
      EXPECT_EQ(communicator->counters().total_bytes_sent(), 3 * bytes);
      communicator->reset_counters();
      QuantizedReducer(nullptr, communicator, bits).reduce_scatter(part, whole, ReduceOp::kSum, "flat").wait();
      EXPECT_EQ(communicator->counters().bytes_sent[size_t(CollectiveKind::kAllToAll)], 3 * bytes);
      EXPECT_EQ(communicator->counters().total_bytes_sent(), 3 * bytes);

      const int node = communicator->rank() / 2, place = communicator->rank() % 2;
      std::shared_ptr<Communicator> inside, across;
      for (const int i : {0, 1}) {
        if (auto group = communicator->new_group({2 * i, 2 * i + 1}, "node")) inside = group;
        if (auto group = communicator->new_group({i, i + 2}, "place")) across = group;
      }
      EXPECT_EQ(inside->rank(), place);
      EXPECT_EQ(across->rank(), node);
      inside->reset_counters();
      across->reset_counters();
      QuantizedReducer(inside, across, bits).reduce_scatter(part, whole, ReduceOp::kSum, "two levels").wait();
      EXPECT_EQ(inside->counters().total_bytes_sent(), 2 * bytes);
      EXPECT_EQ(across->counters().total_bytes_sent(), bytes) << "half of the 2 * bytes that one level sends";
    }
  });
}

TEST(QuantizedCollectives, TheFirstExchangeNeedsNoWaitOfTheOthers) {
  on_threads(2, [](const auto& communicator) {
    const QuantizedReducer reducer(communicator, nullptr, 8);
    const at::Tensor input = torch::full({200}, communicator->rank() + 1.0F);
    at::Tensor part = torch::empty({100});
    const Work work = reducer.reduce_scatter(part, input);
    if (communicator->rank() == 0) work.wait();
    communicator->barrier();
    if (communicator->rank() == 1) work.wait();
    EXPECT_NEAR(part[99].item<float>(), 3.0F, 1e-5);
  });
}

TEST(QuantizedCollectives, AFailedExchangeThrowsAgainAtEveryWait) {
  const auto failing = [](const std::shared_ptr<Communicator>& communicator) {
    if (communicator->rank() == 1) return;  // leaves
    at::Tensor part = torch::empty({100});
    const Work work =
        QuantizedReducer(communicator, nullptr, 8).reduce_scatter(part, torch::ones({200}), ReduceOp::kSum, "g");
    EXPECT_THROW(work.wait(), CommError);
    EXPECT_THROW(work.wait(), CommError);
    EXPECT_FALSE(work.is_completed());
  };
  on_threads(2, failing);
}

TEST(QuantizedCollectives, WrongCallsAreNamed) {
  on_threads(2, [](const auto& communicator) {
    using ::testing::HasSubstr;
    using ::testing::Throws;
    using ::testing::ThrowsMessage;
    const at::Tensor part = torch::zeros({10});
    const at::Tensor whole = torch::zeros({20});
    const QuantizedReducer reducer(communicator, nullptr, 8);
    EXPECT_THAT([&] { comm::quantized_all_gather(part, part, 8, *communicator, "w").wait(); },
                ThrowsMessage<UsageError>(HasSubstr("(w): expected 2 times the elements")));
    EXPECT_THAT([&] { comm::quantized_all_gather(whole.to(at::kInt), part, 8, *communicator, "w").wait(); },
                ThrowsMessage<UsageError>(HasSubstr("output of float32, bfloat16 or float16")));
    EXPECT_THAT([&] { comm::quantized_all_gather(whole, part, 5, *communicator).wait(); }, Throws<UsageError>());
    EXPECT_THAT([&] { reducer.reduce_scatter(part, whole, ReduceOp::kMax, "g").wait(); },
                ThrowsMessage<UsageError>(HasSubstr("(g): expected sum or avg, found max")));
    EXPECT_THAT([&] { reducer.reduce_scatter(part, part, ReduceOp::kSum, "g").wait(); },
                ThrowsMessage<UsageError>(HasSubstr("(g): expected 2 times the elements")));
    EXPECT_THAT([&] { comm::make_quantized_reducer(communicator, 3, 8); },
                ThrowsMessage<UsageError>(HasSubstr("divide the 2 ranks")));
    EXPECT_THAT([&] { QuantizedReducer(nullptr, nullptr, 8); }, Throws<UsageError>());
  });
}

}  // namespace
}  // namespace ds::test
