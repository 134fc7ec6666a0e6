// Ranks with parts of a batch against LibTorch's batch_norm on the joined batch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/layers/batch_norm/joined_batch.h"

namespace ds {
namespace {

using test::expect_as_joined;
using test::NormCase;

TEST(SyncBatchNorm, IsThatOfTheJoinedBatchIn1d) {
  expect_as_joined<torch::nn::BatchNorm1d>({.batches = {4, 4}, .positions = {}});
  expect_as_joined<torch::nn::BatchNorm1d>({.batches = {4, 4}, .positions = {5}});
}

TEST(SyncBatchNorm, IsThatOfTheJoinedBatchIn2d) {
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {2, 2, 2}, .positions = {4, 3}});
}

TEST(SyncBatchNorm, IsThatOfTheJoinedBatchIn3d) {
  expect_as_joined<torch::nn::BatchNorm3d>({.batches = {2, 2}, .positions = {2, 3, 2}});
}

TEST(SyncBatchNorm, IsExactInFloat64) {
  for (const std::vector<int64_t>& batches : {std::vector<int64_t>{3, 3}, std::vector<int64_t>{5, 1, 2}}) {
    expect_as_joined<torch::nn::BatchNorm2d>(
        {.batches = batches, .positions = {4, 3}, .type = at::kDouble, .tolerance = 1e-10});
  }
}

TEST(SyncBatchNorm, WeighsUnevenBatchesByTheirElements) {
  expect_as_joined<torch::nn::BatchNorm1d>({.batches = {7, 2, 3}, .positions = {}});
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {5, 1}, .positions = {2, 2}});
}

TEST(SyncBatchNorm, TakesRanksWithoutSamples) {
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {3, 0, 2}, .positions = {2, 2}});
}

// LibTorch's module refuses [1, C] itself; the operator does not.
TEST(SyncBatchNorm, TakesARankWithOneValuePerChannel) {
  const auto forward = [](torch::nn::BatchNorm1d& norm, const at::Tensor& input) {
    norm->num_batches_tracked += 1;
    return torch::batch_norm(input, norm->weight, norm->bias, norm->running_mean, norm->running_var, true, 0.1,
                             norm->options.eps(), true);
  };
  expect_as_joined<torch::nn::BatchNorm1d>({.batches = {4, 1}, .positions = {}}, forward);
}

TEST(SyncBatchNorm, KeepsItsDigitsFarFromZero) {
  expect_as_joined<torch::nn::BatchNorm2d>(
      {.batches = {2, 3}, .positions = {4, 4}, .type = at::kDouble, .offset = 1e4, .tolerance = 1e-9});
  // In float32 an input near 100 has steps of 8e-6, of a deviation of 2.
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {2, 3}, .positions = {4, 4}, .offset = 100, .tolerance = 2e-5});
}

TEST(SyncBatchNorm, AveragesOverAllBatchesWithoutMomentum) {
  expect_as_joined<torch::nn::BatchNorm2d>(
      {.batches = {2, 3}, .positions = {2, 2}, .momentum = std::nullopt, .steps = 4});
}

TEST(SyncBatchNorm, IsKnownByItsWeightOrByItsStatisticsAlone) {
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {2, 3}, .positions = {2, 2}, .affine = false});
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {2, 3}, .positions = {2, 2}, .track = false});
}

TEST(SyncBatchNorm, ComputesInFloat32OnSixteenBits) {
  expect_as_joined<torch::nn::BatchNorm2d>(
      {.batches = {3, 2}, .positions = {4, 4}, .type = at::kBFloat16, .tolerance = 1.5e-2});
  expect_as_joined<torch::nn::BatchNorm2d>(
      {.batches = {3, 2}, .positions = {4, 4}, .type = at::kHalf, .tolerance = 2e-3});
}

TEST(SyncBatchNorm, TakesChannelsLast) {
  const auto forward = [](torch::nn::BatchNorm2d& norm, const at::Tensor& input) {
    return norm->forward(input.contiguous(at::MemoryFormat::ChannelsLast));
  };
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {2, 3}, .positions = {4, 3}}, forward);
}

TEST(SyncBatchNorm, SixteenBitsBesideFloat32Weights) {
  const auto forward = [](torch::nn::BatchNorm2d& norm, const at::Tensor& input) {
    const at::Tensor output = norm->forward(input.to(at::kBFloat16));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    return output.to(at::kFloat);
  };
  expect_as_joined<torch::nn::BatchNorm2d>({.batches = {3, 2}, .positions = {4, 4}, .tolerance = 1.5e-2}, forward);
}

}  // namespace
}  // namespace ds
