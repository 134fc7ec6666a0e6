// What every reduction with error feedback owes: nothing is lost. Over any number of steps, what arrived and what is
// still remembered add up to what was given.
#include <gtest/gtest.h>

#include <limits>

#include "compression/dense_first.h"
#include "compression/sign_reduction.h"
#include "tests/compression/reduction_runs.h"

namespace ds::test {
namespace {

using compression::BlockQuantizedReduction;
using compression::ErrorMemory;
using compression::ExchangeGroups;
using compression::MatrixBucket;
using compression::NodeGroups;
using compression::NodeOwnerReduction;
using compression::NodeReduction;
using compression::PowerSgdReduction;
using compression::SignReduction;
using compression::TopKReduction;

// A matrix and a vector, without padding.
constexpr int64_t kRows = 30;
constexpr int64_t kColumns = 40;
constexpr int64_t kFeedbackNumel = kRows * kColumns + 12;

enum class Method { kInt8, kInt4, kTopK, kPowerSgd, kSign };

std::unique_ptr<BucketReduction> make_method(Method method, const ExchangeGroups& groups, int64_t numel,
                                             bool feedback = true) {
  ErrorMemory errors({numel}, at::kCPU, feedback);
  switch (method) {
    case Method::kInt8:
      return std::make_unique<BlockQuantizedReduction>(groups, std::move(errors), 8);
    case Method::kInt4:
      return std::make_unique<BlockQuantizedReduction>(groups, std::move(errors), 4);
    case Method::kTopK:
      return std::make_unique<TopKReduction>(groups.first, std::move(errors), 0.03);
    case Method::kSign: {
      compression::SignBucket bucket{numel, {{0, kRows * kColumns}, {kRows * kColumns, 12}}};
      if (numel == 0) bucket.ranges.clear();
      return std::make_unique<SignReduction>(groups.first, std::vector{bucket}, at::kCPU, feedback);
    }
    case Method::kPowerSgd:
      break;
  }
  const std::vector<ParameterInfo> infos = {{"weight", {kRows, kColumns}, kRows * kColumns}, {"bias", {12}, 12}};
  MatrixBucket bucket;
  if (numel > 0) {
    bucket = compression::matrices_of({{0, 0, 0, kRows * kColumns}, {1, 0, kRows * kColumns, 12}}, infos, numel, 2);
  }
  return std::make_unique<PowerSgdReduction>(groups, std::move(errors), std::vector<MatrixBucket>{bucket}, at::kCPU);
}

// What a rank remembers of the sum, at its place in the bucket; a server of signs remembers a part of the mean.
at::Tensor remembered_of(const BucketReduction& reduction, const ExchangeGroups& groups) {
  at::Tensor total = torch::zeros({kFeedbackNumel});
  for (const auto& [name, tensor] : reduction.memory()) {
    if (name == "error.0") total += tensor;
    if (name != "server.0") continue;
    const compression::CompressedAllReduce parts(*groups.first, {{0, kFeedbackNumel}}, kFeedbackNumel);
    total.narrow(0, parts.part_begin(groups.rank()), tensor.numel()).add_(tensor, groups.size());
  }
  return total;
}

class ErrorFeedback : public ::testing::TestWithParam<std::tuple<Method, int, bool, at::ScalarType>> {};

TEST_P(ErrorFeedback, LosesNothing) {
  const auto [method, world, scatter, dtype] = GetParam();
  run_ranks(world, [method = method, scatter = scatter, dtype = dtype](Communicator& communicator) {
    const ExchangeGroups groups = exchange_groups(lent(communicator));
    const auto reduction = make_method(method, groups, kFeedbackNumel);
    at::Tensor given = torch::zeros({kFeedbackNumel}, torch::kDouble);
    at::Tensor arrived = torch::zeros({kFeedbackNumel}, torch::kDouble);
    double rounding = 1e-4;
    for (int64_t step = 0; step < 12; ++step) {
      // The loss scale changes on the way.
      const double scale = step < 4 ? 1.0 : step < 8 ? 64.0 : 8.0;
      reduction->begin_pass(step, scale);
      const at::Tensor gradient = gradient_of(kFeedbackNumel, communicator.rank(), step, dtype) * scale;
      const at::Tensor result = reduce(*reduction, communicator, gradient, scatter) / scale;
      EXPECT_TRUE(same_on_all_ranks(result, communicator));
      arrived += result.to(torch::kDouble);
      given += gradient.to(torch::kDouble) / scale;
      // The output's own rounding is nobody's error.
      if (dtype != at::kFloat) rounding += result.abs().max().to(torch::kDouble).item<double>() / 256;
    }
    const at::Tensor remembered = sum_over_ranks(remembered_of(*reduction, groups), communicator);
    given = sum_over_ranks(given, communicator);
    EXPECT_TRUE((arrived + remembered).allclose(given, 1e-5, rounding))
        << ((arrived + remembered) - given).abs().max().item<double>();
    if (communicator.size() > 1) EXPECT_GT(remembered.abs().max().item<double>(), 1e-3) << "it compresses";
  });
}

INSTANTIATE_TEST_SUITE_P(
    Methods, ErrorFeedback,
    ::testing::Combine(::testing::Values(Method::kInt8, Method::kInt4, Method::kTopK, Method::kPowerSgd, Method::kSign),
                       ::testing::Values(1, 2, 3, 4), ::testing::Bool(), ::testing::Values(at::kFloat, at::kBFloat16)));

NodeGroups node_groups(Communicator& world, int ranks_of_node) {
  const auto nodes = comm::consecutive_ranks(world.size(), ranks_of_node);
  const auto inside = comm::own_group(world, nodes, "node");
  return {.inside = {inside, comm::own_group(world, nodes, "node again")},
          .node = world.rank() / ranks_of_node,
          .nodes = world.size() / ranks_of_node};
}

ExchangeGroups place_groups(Communicator& world, int ranks_of_node) {
  const auto places = comm::ranks_of_one_place(world.size(), ranks_of_node);
  return {comm::own_group(world, places, "place"), comm::own_group(world, places, "place again")};
}

// A rank's error at its place in the bucket.
at::Tensor placed_error(const at::Tensor& error, const NodeGroups& groups, bool scatter, int64_t numel) {
  const int places = groups.inside.size();
  const int64_t length = compression::node_part_numel(numel, places);
  at::Tensor whole = torch::zeros({length * places});
  if (scatter) {
    whole.view({groups.nodes, places, -1}).select(1, groups.inside.rank()).copy_(error.view({groups.nodes, -1}));
  } else {
    whole.narrow(0, groups.inside.rank() * length, length).copy_(error);
  }
  return whole.narrow(0, 0, numel);
}

class Float16Feedback : public ::testing::TestWithParam<std::tuple<Method, int, bool>> {};

// A loss scale that begins too high: float16 overflows on some ranks, in some elements, until it has fallen.
TEST_P(Float16Feedback, OverflowPasses) {
  const auto [method, world, scatter] = GetParam();
  run_ranks(world, [method = method, scatter = scatter](Communicator& communicator) {
    const auto reduction = make_method(method, exchange_groups(lent(communicator)), kFeedbackNumel);
    double scale = 1 << 22;
    for (int64_t step = 0; step < 14; ++step, scale /= 2) {
      reduction->begin_pass(step, scale);
      const at::Tensor values =
          gradient_of(kFeedbackNumel, communicator.rank(), step) * 0.3 * (communicator.rank() + 1);
      const at::Tensor found =
          reduce(*reduction, communicator, (values * scale).to(at::kHalf), scatter, ReduceOp::kAvg);
      if (step < 5 || step > 9) EXPECT_EQ(torch::isfinite(found).all().item<bool>(), step > 9) << step;
      for (const auto& [name, tensor] : reduction->memory()) {
        EXPECT_TRUE(torch::isfinite(tensor).all().item<bool>()) << name << " step " << step;
      }
    }
  });
}

// Gradients near the end of float16, which add up to more in the memory. Sums that overflow arrive as such; what is
// remembered stays finite, and it passes.
TEST_P(Float16Feedback, WhatIsRememberedStaysFinite) {
  const auto [method, world, scatter] = GetParam();
  run_ranks(world, [method = method, scatter = scatter](Communicator& communicator) {
    const auto reduction = make_method(method, exchange_groups(lent(communicator)), kFeedbackNumel);
    for (int64_t step = 0; step < 24; ++step) {
      reduction->begin_pass(step, 1 << 16);
      at::Tensor gradient = gradient_of(kFeedbackNumel, communicator.rank(), 0);
      if (step < 8) gradient *= 60000 / gradient.abs().max().item<double>();
      const at::Tensor found = reduce(*reduction, communicator, gradient.to(at::kHalf), scatter, ReduceOp::kAvg);
      EXPECT_TRUE(step < 16 || found.isfinite().all().item<bool>()) << "step " << step;
      for (const auto& [name, tensor] : reduction->memory()) {
        ASSERT_TRUE(tensor.isfinite().all().item<bool>()) << name << " step " << step;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Methods, Float16Feedback,
                         ::testing::Combine(::testing::Values(Method::kInt8, Method::kInt4, Method::kTopK,
                                                              Method::kPowerSgd, Method::kSign),
                                            ::testing::Values(1, 2, 3, 4), ::testing::Bool()));

class NodeFeedback : public ::testing::TestWithParam<std::tuple<Method, int, bool>> {};

TEST_P(NodeFeedback, LosesNothing) {
  const auto [method, ranks_of_node, scatter] = GetParam();
  run_ranks(4, [method = method, ranks_of_node = ranks_of_node, scatter = scatter](Communicator& communicator) {
    const NodeGroups groups = node_groups(communicator, ranks_of_node);
    const ExchangeGroups across = place_groups(communicator, ranks_of_node);
    std::unique_ptr<BucketReduction> reduction;
    const bool by_owners = method == Method::kPowerSgd || method == Method::kSign;
    if (by_owners) {
      const bool owns = compression::owner_of_bucket(0, ranks_of_node) == groups.inside.rank();
      reduction = std::make_unique<NodeOwnerReduction>(groups, make_method(method, across, owns ? kFeedbackNumel : 0));
    } else {
      const int64_t part = compression::node_part_numel(kFeedbackNumel, ranks_of_node);
      reduction = std::make_unique<NodeReduction>(groups, make_method(method, across, part));
    }
    at::Tensor given = torch::zeros({kFeedbackNumel}, torch::kDouble);
    at::Tensor arrived = torch::zeros({kFeedbackNumel}, torch::kDouble);
    for (int64_t step = 0; step < 6; ++step) {
      const at::Tensor gradient = gradient_of(kFeedbackNumel, communicator.rank(), step);
      const at::Tensor result = reduce(*reduction, communicator, gradient, scatter);
      EXPECT_TRUE(same_on_all_ranks(result, communicator));
      arrived += result.to(torch::kDouble);
      given += gradient.to(torch::kDouble);
    }
    at::Tensor remembered = by_owners ? remembered_of(*reduction, across)
                                      : placed_error(error_of(*reduction), groups, scatter, kFeedbackNumel);
    remembered = sum_over_ranks(remembered, communicator);
    given = sum_over_ranks(given, communicator);
    EXPECT_TRUE((arrived + remembered).allclose(given, 1e-5, 1e-4));
    EXPECT_EQ(remembered.abs().max().item<double>() > 1e-3, groups.nodes > 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Methods, NodeFeedback,
                         ::testing::Combine(::testing::Values(Method::kInt8, Method::kTopK, Method::kPowerSgd,
                                                              Method::kSign),
                                            ::testing::Values(1, 2, 4), ::testing::Bool()));

TEST(NodeReduction, InsideANodeNothingIsLostAtOnce) {
  run_ranks(4, [](Communicator& communicator) {
    // The ranks of a node differ much, the nodes not at all: what a node sends compresses without loss.
    const NodeGroups groups = node_groups(communicator, 2);
    NodeReduction reduction(groups, make_method(Method::kTopK, place_groups(communicator, 2),
                                                compression::node_part_numel(kFeedbackNumel, 2)));
    at::Tensor gradient = gradient_of(kFeedbackNumel, 0, 0) * (groups.inside.rank() == 0 ? 1 : -1);
    gradient[5] += 3;
    const at::Tensor found = reduce(reduction, communicator, gradient, false);
    at::Tensor expected = torch::zeros({kFeedbackNumel});
    expected[5] = 12;
    EXPECT_TRUE(found.allclose(expected, 1e-5, 1e-5));
  });
}

TEST(NodeReduction, TakesABucketThatTheRanksOfANodeDoNotDivide) {
  for (const int64_t numel : {1, 5, 1001}) {
    run_ranks(4, [numel](Communicator& communicator) {
      NodeReduction reduction(node_groups(communicator, 2), make_method(Method::kInt8, place_groups(communicator, 2),
                                                                        compression::node_part_numel(numel, 2)));
      const at::Tensor found = reduce(reduction, communicator, gradient_of(numel, communicator.rank(), 0), false);
      EXPECT_TRUE(found.to(torch::kDouble).allclose(summed_gradients(numel, 4, 0), 0, 0.2)) << numel;
      EXPECT_TRUE(same_on_all_ranks(found, communicator));
    });
  }
}

TEST(SignReduction, NanArrivesAndIsForgotten) {
  run_ranks(3, [](Communicator& communicator) {
    for (const bool scatter : {false, true}) {
      const auto reduction = make_method(Method::kSign, exchange_groups(lent(communicator)), kFeedbackNumel);
      at::Tensor gradient = gradient_of(kFeedbackNumel, communicator.rank(), 0);
      if (communicator.rank() == 1) gradient[3] = std::numeric_limits<float>::infinity();
      const at::Tensor found = reduce(*reduction, communicator, gradient, scatter);
      EXPECT_FALSE(torch::isfinite(found.narrow(0, 0, kRows * kColumns)).any().item<bool>());
      for (const auto& [name, tensor] : reduction->memory()) {
        EXPECT_TRUE(torch::isfinite(tensor).all().item<bool>()) << name;
      }
      const at::Tensor next = gradient_of(kFeedbackNumel, communicator.rank(), 1);
      EXPECT_TRUE(torch::isfinite(reduce(*reduction, communicator, next, scatter)).all().item<bool>());
    }
  });
}

TEST(SignReduction, WithoutFeedbackNothingIsRemembered) {
  run_ranks(3, [](Communicator& communicator) {
    const auto reduction = make_method(Method::kSign, exchange_groups(lent(communicator)), kFeedbackNumel, false);
    EXPECT_TRUE(reduction->memory().empty());
    const at::Tensor gradient = gradient_of(kFeedbackNumel, communicator.rank(), 0);
    const at::Tensor first = reduce(*reduction, communicator, gradient, false, ReduceOp::kAvg);
    EXPECT_TRUE(torch::equal(reduce(*reduction, communicator, gradient, false, ReduceOp::kAvg), first));
    EXPECT_TRUE(torch::equal(reduce(*reduction, communicator, gradient, true, ReduceOp::kSum), first * 3));
  });
}

TEST(NodeReduction, SendsOneLthBetweenNodes) {
  run_ranks(4, [](Communicator& communicator) {
    const ExchangeGroups across = place_groups(communicator, 2);
    const NodeGroups groups = node_groups(communicator, 2);
    NodeReduction reduction(groups, make_method(Method::kTopK, across, 500));
    at::Tensor gradient = gradient_of(1000, communicator.rank(), 0);
    reduction.start(0, gradient, gradient, ReduceOp::kSum, "gradients").wait();
    EXPECT_EQ(across.first->counters().total_bytes_sent(), 15 * 8);
  });
}

TEST(DenseFirst, CompressesFromItsStepOn) {
  run_ranks(3, [](Communicator& communicator) {
    for (const bool scatter : {false, true}) {
      compression::DenseFirst reduction(
          lent(communicator), make_method(Method::kTopK, exchange_groups(lent(communicator)), kFeedbackNumel), 2);
      for (int64_t step = 0; step < 4; ++step) {
        reduction.begin_pass(step, 1.0);
        const at::Tensor gradient = gradient_of(kFeedbackNumel, communicator.rank(), step);
        const at::Tensor found = reduce(reduction, communicator, gradient, scatter);
        const bool exact = found.to(torch::kDouble).allclose(summed_gradients(kFeedbackNumel, 3, step), 1e-5, 1e-5);
        EXPECT_EQ(exact, step < 2) << step;
        EXPECT_EQ(error_of(reduction).abs().max().item<double>() > 0, step >= 2);
      }
      EXPECT_EQ(reduction.memory_bytes(), kFeedbackNumel * 4);
      reduction.forget();
      EXPECT_EQ(error_of(reduction).abs().max().item<double>(), 0);
    }
  });
}

}  // namespace
}  // namespace ds::test
