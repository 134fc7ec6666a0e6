// Top-k reductions against the same selection on plain tensors.
#include "compression/top_k_reduction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "tests/compression/reduction_runs.h"

namespace ds::test {
namespace {

using compression::ErrorMemory;
using compression::TopKReduction;

struct TopKReference {
  int world;
  bool scatter;
  double share;
  std::vector<at::Tensor> errors;

  at::Tensor step(const std::vector<at::Tensor>& gradients) {
    const at::ScalarType dtype = gradients[0].scalar_type();
    const int64_t numel = gradients[0].numel();
    const int64_t length = scatter ? numel / world : numel;
    const auto count = static_cast<int64_t>(std::ceil(share * static_cast<double>(length)));
    at::Tensor sum = torch::zeros({numel});
    for (int rank = 0; rank < world; ++rank) {
      if (errors.size() <= static_cast<size_t>(rank)) errors.push_back(torch::zeros({numel}));
      const at::Tensor& error = errors[static_cast<size_t>(rank)];
      error.add_(gradients[static_cast<size_t>(rank)]);
      for (int64_t begin = 0; begin < numel; begin += length) {
        const at::Tensor part = error.narrow(0, begin, length);
        const at::Tensor mask = torch::zeros({length}).index_fill_(0, compression::largest_elements(part, count), 1);
        const at::Tensor sent = (part * mask).to(dtype).to(torch::kFloat);
        sum.narrow(0, begin, length).add_(sent);
        part.sub_(sent);
      }
    }
    return sum.to(dtype);
  }
};

class TopK : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(TopK, ArrivesAsThePlainArithmeticSays) {
  const auto [world, scatter] = GetParam();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double share : {0.001, 0.05, 1.0}) {
      constexpr int64_t kNumel = 1212;
      TopKReference reference{world, scatter, share, {}};
      std::vector<at::Tensor> expected;
      for (int64_t step = 0; step < 4; ++step) {
        std::vector<at::Tensor> gradients;
        for (int rank = 0; rank < world; ++rank) gradients.push_back(gradient_of(kNumel, rank, step, dtype));
        expected.push_back(reference.step(gradients));
      }
      run_ranks(world, [&, world = world, scatter = scatter](Communicator& communicator) {
        TopKReduction reduction(lent(communicator), ErrorMemory({kNumel}, at::kCPU, true), share);
        for (int64_t step = 0; step < 4; ++step) {
          const at::Tensor gradient = gradient_of(kNumel, communicator.rank(), step, dtype);
          const at::Tensor found = reduce(reduction, communicator, gradient, scatter);
          EXPECT_TRUE(torch::equal(found, world == 1 ? gradient : expected[static_cast<size_t>(step)]))
              << dtype << " " << share << " step " << step;
          EXPECT_TRUE(same_on_all_ranks(found, communicator));
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TopK, ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()));

TEST(TopKReduction, TheMeanIsTheSumByTheNumberOfRanks) {
  run_ranks(4, [](Communicator& communicator) {
    TopKReduction first(lent(communicator), ErrorMemory({400}, at::kCPU, false), 0.1);
    const at::Tensor gradient = gradient_of(400, communicator.rank(), 0);
    const at::Tensor sum = reduce(first, communicator, gradient, false);
    EXPECT_TRUE(torch::equal(reduce(first, communicator, gradient, false, ReduceOp::kAvg), sum / 4));
    EXPECT_GE((sum != 0).sum().item<int64_t>(), 40);
    EXPECT_LE((sum != 0).sum().item<int64_t>(), 160);
  });
}

TEST(TopKReduction, SendsEightBytesForAnElement) {
  constexpr int64_t kNumel = 100000;
  run_ranks(4, [](Communicator& communicator) {
    TopKReduction reduction(lent(communicator), ErrorMemory({kNumel}, at::kCPU, true), 0.01);
    at::Tensor gradient = gradient_of(kNumel, communicator.rank(), 0);
    const auto sent = [&] { return communicator.counters().total_bytes_sent(); };
    reduction.start(0, gradient, gradient, ReduceOp::kSum, "gradients").wait();
    EXPECT_EQ(sent(), 3 * 1000 * 8);
    const int64_t before = sent();
    const at::Tensor own = torch::empty({kNumel / 4});
    reduction.start(0, own, gradient, ReduceOp::kSum, "gradients").wait();
    EXPECT_EQ(sent() - before, 3 * 250 * 8);
    const int64_t reduced = sent();
    at::Tensor half = gradient.to(at::kHalf);
    reduction.start(0, half, half, ReduceOp::kSum, "gradients").wait();
    EXPECT_EQ(sent() - reduced, 3 * 1000 * 6);
  });
}

TEST(TopKReduction, NanArrivesOnAllRanksAndIsForgotten) {
  constexpr int64_t kNumel = 240;
  run_ranks(3, [](Communicator& communicator) {
    for (const bool feedback : {true, false}) {
      for (const bool scatter : {false, true}) {
        TopKReduction reduction(lent(communicator), ErrorMemory({kNumel}, at::kCPU, feedback), 0.1);
        at::Tensor gradient = gradient_of(kNumel, communicator.rank(), 0);
        if (communicator.rank() == 2) gradient[7] = std::numeric_limits<float>::quiet_NaN();
        const at::Tensor found = reduce(reduction, communicator, gradient, scatter);
        for (const at::Tensor& part : found.chunk(3)) EXPECT_TRUE(!scatter || part.isnan().any().item<bool>());
        EXPECT_TRUE(found.isnan().any().item<bool>());
        const at::Tensor next = reduce(reduction, communicator, gradient_of(kNumel, communicator.rank(), 1), scatter);
        EXPECT_TRUE(torch::isfinite(next).all().item<bool>());
      }
    }
  });
}

// Two elements of one sign and size that both are larger than half of float16's range: what one waits grows past it.
TEST(TopKReduction, WhatHasGrownBeyondFloat16StaysFiniteAndIsSentLater) {
  constexpr int64_t kNumel = 48;
  constexpr int kOverflowSteps = 12;
  run_ranks(2, [](Communicator& communicator) {
    for (const bool scatter : {false, true}) {
      TopKReduction reduction(lent(communicator), ErrorMemory({kNumel}, at::kCPU, true), 0.02);
      at::Tensor given = torch::zeros({kNumel}, torch::kDouble);
      at::Tensor arrived = torch::zeros({kNumel}, torch::kDouble);
      double largest = 0;
      for (int64_t step = 0; step < kOverflowSteps; ++step) {
        reduction.begin_pass(step, 1024.0);
        at::Tensor gradient = torch::zeros({kNumel}, torch::kHalf);
        if (step < 4) gradient.narrow(0, 1, 2).fill_(60000);
        given += gradient.to(torch::kDouble);
        const at::Tensor found = reduce(reduction, communicator, gradient, scatter, ReduceOp::kAvg);
        EXPECT_TRUE(found.isfinite().all().item<bool>()) << "step " << step;
        arrived += found.to(torch::kDouble);
        const at::Tensor error = error_of(reduction);
        ASSERT_TRUE(error.isfinite().all().item<bool>()) << "step " << step;
        largest = std::max(largest, error.max().item<double>() * 1024.0);
        EXPECT_TRUE(torch::equal(arrived + error.to(torch::kDouble) * 1024.0, given)) << "step " << step;
      }
      EXPECT_GT(largest, 65504.0);
      EXPECT_TRUE(torch::equal(arrived, given));
    }
  });
}

// Of a checkpoint that an overflow had spoilt.
TEST(TopKReduction, WhatIsNotFiniteInTheMemoryCountsAsNothing) {
  constexpr int64_t kNumel = 240;
  run_ranks(3, [](Communicator& communicator) {
    for (const bool scatter : {false, true}) {
      TopKReduction clean(lent(communicator), ErrorMemory({kNumel}, at::kCPU, true), 0.1);
      TopKReduction spoilt(lent(communicator), ErrorMemory({kNumel}, at::kCPU, true), 0.1);
      at::Tensor error = error_of(spoilt);
      if (communicator.rank() == 1) {
        error[3] = std::numeric_limits<float>::quiet_NaN();
        error[100] = -std::numeric_limits<float>::infinity();
        error[200] = std::numeric_limits<float>::infinity();
      }
      for (int64_t step = 0; step < 3; ++step) {
        const at::Tensor gradient = gradient_of(kNumel, communicator.rank(), step);
        const at::Tensor found = reduce(spoilt, communicator, gradient, scatter);
        EXPECT_TRUE(torch::equal(found, reduce(clean, communicator, gradient, scatter))) << "step " << step;
      }
      EXPECT_TRUE(torch::equal(error_of(spoilt), error_of(clean)));
    }
  });
}

TEST(TopKReduction, RefusesASharePastTheWhole) {
  run_ranks(1, [](Communicator& communicator) {
    for (const double share : {0.0, -0.1, 1.5}) {
      EXPECT_THROW(TopKReduction(lent(communicator), ErrorMemory({8}, at::kCPU, true), share), UsageError) << share;
    }
  });
}

}  // namespace
}  // namespace ds::test
