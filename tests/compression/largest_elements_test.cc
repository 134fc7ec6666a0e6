#include "compression/top_k_reduction.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

namespace ds::compression {
namespace {

// By a stable sort.
std::set<int64_t> expected_positions(const at::Tensor& values, int64_t count) {
  const at::Tensor magnitudes = values.to(torch::kDouble).abs();
  const double* data = magnitudes.const_data_ptr<double>();
  std::vector<int64_t> order(static_cast<size_t>(values.numel()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return data[a] > data[b]; });
  return {order.begin(), order.begin() + count};
}

std::set<int64_t> found_positions(const at::Tensor& values, int64_t count) {
  const at::Tensor positions = largest_elements(values, count);
  EXPECT_EQ(positions.scalar_type(), at::kLong);
  EXPECT_EQ(positions.numel(), count);
  const int64_t* data = positions.const_data_ptr<int64_t>();
  return {data, data + positions.numel()};
}

TEST(LargestElements, AreThoseOfAStableSort) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    // Few distinct values, so that ties are the rule.
    const at::Tensor values = (torch::sin(torch::arange(1000) * 12.9898) * 9).round().to(dtype);
    for (const int64_t count : {0, 1, 7, 500, 999, 1000}) {
      EXPECT_EQ(found_positions(values, count), expected_positions(values, count)) << dtype << " " << count;
    }
  }
}

TEST(LargestElements, OfManyElementsASampleDecidesNothing) {
  const at::Tensor index = torch::arange(50021, torch::kDouble);
  const at::Tensor smooth = (torch::sin(index * 12.9898) * torch::sin(index * 0.01)).to(at::kFloat);
  at::Tensor misleading = smooth.clone();
  misleading.slice(0, 0, misleading.numel(), 61).mul_(100);  // all that a sample sees is large
  for (const at::Tensor& values : {smooth, misleading, (smooth * 3).round(), torch::zeros({50021})}) {
    for (const int64_t count : {1, 1000, 20000}) {
      EXPECT_EQ(found_positions(values, count), expected_positions(values, count)) << count;
    }
  }
}

TEST(LargestElements, OfEqualOnesTheFirst) {
  EXPECT_EQ(found_positions(torch::tensor({2.0F, -2.0F, 2.0F, 1.0F, -2.0F}), 3), (std::set<int64_t>{0, 1, 2}));
  EXPECT_EQ(found_positions(torch::zeros({6}), 2), (std::set<int64_t>{0, 1}));
  EXPECT_EQ(found_positions(torch::tensor({0.0F, 3.0F, 0.0F, 0.0F}), 2), (std::set<int64_t>{0, 1}));
}

}  // namespace
}  // namespace ds::compression
