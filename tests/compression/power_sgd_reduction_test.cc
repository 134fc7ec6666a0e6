// PowerSGD against what its paper says of it, on plain tensors.
#include "compression/power_sgd_reduction.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/compression/reduction_runs.h"

namespace ds::test {
namespace {

using compression::ErrorMemory;
using compression::matrices_of;
using compression::MatrixBucket;
using compression::PowerSgdReduction;

// A matrix, a vector, a small matrix that stays dense, padding, a kernel of four dimensions, padding.
const std::vector<ParameterInfo> kPowerInfos = {
    {"weight", {24, 30}, 720}, {"bias", {24}, 24}, {"thin", {2, 2}, 4}, {"conv", {10, 4, 3, 3}, 360}};
const std::vector<Segment> kPowerSegments = {{0, 0, 0, 720}, {1, 0, 720, 24}, {2, 0, 752, 4}, {3, 0, 768, 360}};
constexpr int64_t kPowerNumel = 1152;

MatrixBucket power_bucket(int64_t rank) { return matrices_of(kPowerSegments, kPowerInfos, kPowerNumel, rank); }

at::Tensor covered() {
  at::Tensor mask = torch::zeros({kPowerNumel});
  for (const Segment& segment : kPowerSegments) mask.narrow(0, segment.slice_offset, segment.length).fill_(1);
  return mask;
}

// Padding is zero, as in a bucket.
at::Tensor power_gradient(int rank, int64_t step, at::ScalarType dtype = at::kFloat) {
  return gradient_of(kPowerNumel, rank, step, dtype) * covered().to(dtype);
}

at::Tensor power_sum(int world, int64_t step) {
  return summed_gradients(kPowerNumel, world, step) * covered().to(torch::kDouble);
}

at::Tensor weight_in(const at::Tensor& flat) { return flat.narrow(0, 0, 720).view({24, 30}); }
at::Tensor conv_in(const at::Tensor& flat) { return flat.narrow(0, 768, 360).view({10, 36}); }

std::unique_ptr<PowerSgdReduction> power_sgd(Communicator& communicator, int64_t rank, bool feedback = true) {
  return std::make_unique<PowerSgdReduction>(exchange_groups(lent(communicator)),
                                             ErrorMemory({kPowerNumel}, at::kCPU, feedback),
                                             std::vector<MatrixBucket>{power_bucket(rank)}, at::kCPU);
}

class PowerSgd : public ::testing::TestWithParam<std::tuple<int, bool>> {};

class PowerSgdOfSeveral : public PowerSgd {};  // one rank alone keeps its gradient

TEST_P(PowerSgdOfSeveral, OneStepProjectsOnTheColumnsThatTheFactorGives) {
  const auto [world, scatter] = GetParam();
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
    run_ranks(world, [&, world = world, scatter = scatter](Communicator& communicator) {
      const auto reduction = power_sgd(communicator, 2);
      const at::Tensor q = reduction->memory().back().second.clone().to(torch::kDouble);
      const at::Tensor found =
          reduce(*reduction, communicator, power_gradient(communicator.rank(), 0), scatter, op).to(torch::kDouble);
      EXPECT_TRUE(same_on_all_ranks(found, communicator));
      const at::Tensor sum = power_sum(world, 0) / (op == ReduceOp::kAvg ? world : 1);
      const auto project = [](const at::Tensor& m, const at::Tensor& right) {
        const at::Tensor p = std::get<0>(torch::linalg_qr(m.mm(right)));
        return p.mm(p.t()).mm(m);
      };
      EXPECT_TRUE(weight_in(found).allclose(project(weight_in(sum), q.narrow(0, 0, 60).view({30, 2})), 1e-4, 1e-4));
      EXPECT_TRUE(conv_in(found).allclose(project(conv_in(sum), q.narrow(0, 60, 72).view({36, 2})), 1e-4, 1e-4));
      EXPECT_TRUE(found.narrow(0, 720, 48).allclose(sum.narrow(0, 720, 48), 1e-6, 1e-6)) << "dense, with padding";
      EXPECT_EQ(found.narrow(0, 1128, 24).abs().max().item<double>(), 0) << "padding";
    });
  }
}

TEST_P(PowerSgd, AMatrixOfTheRankOfTheFactorsArrivesWhole) {
  const auto [world, scatter] = GetParam();
  run_ranks(world, [scatter = scatter](Communicator& communicator) {
    const auto reduction = power_sgd(communicator, 3, /*feedback=*/false);
    // Ranks of a matrix: 2 in all, though each rank has other values.
    const at::Tensor left = gradient_of(48, 9, 0).view({24, 2});
    const at::Tensor right = gradient_of(60, communicator.rank(), 0).view({2, 30});
    at::Tensor gradient = torch::zeros({kPowerNumel});
    weight_in(gradient).copy_(left.mm(right));
    const at::Tensor found = reduce(*reduction, communicator, gradient, scatter);
    EXPECT_TRUE(found.to(torch::kDouble).allclose(sum_over_ranks(gradient, communicator), 1e-4, 1e-4));
  });
}

TEST_P(PowerSgd, AMatrixOfZerosDoesNotStayZero) {
  const auto [world, scatter] = GetParam();
  run_ranks(world, [world = world, scatter = scatter](Communicator& communicator) {
    const auto reduction = power_sgd(communicator, 2);
    const at::Tensor zeros = torch::zeros({kPowerNumel});
    EXPECT_TRUE(torch::equal(reduce(*reduction, communicator, zeros, scatter), zeros));
    const at::Tensor found = reduce(*reduction, communicator, power_gradient(communicator.rank(), 0), scatter);
    EXPECT_GT(weight_in(found).norm().item<double>(), 0.05 * weight_in(power_sum(world, 0)).norm().item<double>());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PowerSgd, ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()));
INSTANTIATE_TEST_SUITE_P(Ranks, PowerSgdOfSeveral, ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Bool()));

TEST(PowerSgdReduction, AWarmStartFindsTheLargestDirections) {
  run_ranks(2, [](Communicator& communicator) {
    const auto reduction = power_sgd(communicator, 2, /*feedback=*/false);
    // The same in every step: each one is a power iteration.
    const at::Tensor gradient = power_gradient(communicator.rank(), 0);
    at::Tensor found;
    for (int step = 0; step < 60; ++step) found = reduce(*reduction, communicator, gradient, false);
    const at::Tensor weight = weight_in(power_sum(2, 0));
    const at::Tensor values = std::get<1>(torch::linalg_svd(weight));
    const double best = values.narrow(0, 2, values.numel() - 2).norm().item<double>();
    EXPECT_NEAR((weight_in(found).to(torch::kDouble) - weight).norm().item<double>(), best, 0.01 * best);
  });
}

TEST(PowerSgdReduction, SendsItsFactors) {
  run_ranks(3, [](Communicator& communicator) {
    const auto groups = exchange_groups(lent(communicator));
    PowerSgdReduction reduction(groups, ErrorMemory({kPowerNumel}, at::kCPU, true), {power_bucket(2)}, at::kCPU);
    at::Tensor gradient = power_gradient(communicator.rank(), 0);
    const int64_t before = communicator.counters().total_bytes_sent();
    reduction.start(0, gradient, gradient, ReduceOp::kSum, "gradients").wait();
    const auto sent = [](int64_t elements) { return 2 * elements * 4 * 2 / 3; };  // by one of three ranks
    EXPECT_NEAR(communicator.counters().total_bytes_sent() - before, sent(2 * (24 + 10) + 28), 16);
    EXPECT_NEAR(groups.second->counters().total_bytes_sent(), sent(2 * (30 + 36)), 16);
  });
}

TEST(PowerSgdReduction, NanArrivesOnAllRanksAndLeavesTheErrors) {
  run_ranks(3, [](Communicator& communicator) {
    const auto reduction = power_sgd(communicator, 2);
    reduce(*reduction, communicator, power_gradient(communicator.rank(), 0), false);
    const at::Tensor before = error_of(*reduction).clone();
    at::Tensor gradient = power_gradient(communicator.rank(), 1);
    if (communicator.rank() == 1) gradient[40] = std::numeric_limits<float>::infinity();
    EXPECT_TRUE(reduce(*reduction, communicator, gradient, false).isnan().all().item<bool>());
    EXPECT_TRUE(error_of(*reduction).allclose(before, 1e-5, 1e-5));
    EXPECT_TRUE(torch::isfinite(reduce(*reduction, communicator, power_gradient(communicator.rank(), 2), true))
                    .all()
                    .item<bool>());
  });
}

TEST(PowerSgdReduction, ForgettingIsBeginningAgain) {
  run_ranks(2, [](Communicator& communicator) {
    const auto reduction = power_sgd(communicator, 2);
    const at::Tensor first = reduce(*reduction, communicator, power_gradient(communicator.rank(), 0), false);
    EXPECT_FALSE(torch::equal(reduce(*reduction, communicator, power_gradient(communicator.rank(), 0), false), first));
    reduction->forget();
    EXPECT_TRUE(torch::equal(reduce(*reduction, communicator, power_gradient(communicator.rank(), 0), false), first));
  });
}

TEST(PowerSgdReduction, ABucketWithoutMatricesIsOneDenseAllReduce) {
  run_ranks(2, [](Communicator& communicator) {
    const auto groups = exchange_groups(lent(communicator));
    PowerSgdReduction reduction(groups, ErrorMemory({64}, at::kCPU, true),
                                {matrices_of({{0, 0, 0, 40}}, {{"bias", {40}, 40}}, 64, 4)}, at::kCPU);
    at::Tensor gradient = gradient_of(64, communicator.rank(), 0);
    gradient.narrow(0, 40, 24).zero_();
    const at::Tensor found = reduce(reduction, communicator, gradient, false);
    EXPECT_TRUE(found.to(torch::kDouble).allclose(sum_over_ranks(gradient, communicator), 1e-6, 1e-6));
    EXPECT_EQ(groups.second->counters().total_bytes_sent(), 0);
  });
}

}  // namespace
}  // namespace ds::test
