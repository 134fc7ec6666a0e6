#include "layers/batch_norm/batch_statistics.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ds::norm {
namespace {

const std::vector<int64_t> kAllButChannels = {0, 2};

TEST(BatchStatistics, PartsOfAnySizeJoinToThoseOfTheWhole) {
  const at::Tensor whole = torch::randn({9, 4, 5}, torch::kDouble) * 3 + 7;
  std::vector<at::Tensor> parts;
  for (const auto& [begin, size] : {std::pair<int64_t, int64_t>{0, 1}, {1, 0}, {1, 6}, {7, 2}}) {
    parts.push_back(local_statistics(whole.narrow(0, begin, size)));
  }
  const BatchStatistics joined = join_statistics(at::stack(parts), whole, 1e-5);
  EXPECT_EQ(joined.count.item<double>(), 45);
  EXPECT_TRUE(joined.mean.allclose(whole.mean(at::OptionalIntArrayRef(kAllButChannels)), 1e-12, 1e-12));
  EXPECT_TRUE(joined.variance.allclose(
      whole.var(at::OptionalIntArrayRef(kAllButChannels), /*correction=*/c10::Scalar(0)), 1e-12, 1e-12));
  EXPECT_TRUE(joined.unbiased.allclose(
      whole.var(at::OptionalIntArrayRef(kAllButChannels), /*correction=*/c10::Scalar(1)), 1e-12, 1e-12));
  EXPECT_TRUE(joined.inverse.allclose(
      (whole.var(at::OptionalIntArrayRef(kAllButChannels), /*correction=*/c10::Scalar(0)) + 1e-5).rsqrt(), 1e-12,
      1e-12));
}

TEST(BatchStatistics, RunningValuesOfSixteenBitsAreRoundedOnce) {
  at::Tensor running = torch::tensor({1.0, 2.0}, torch::kDouble).to(at::kBFloat16);
  const at::Tensor value = torch::tensor({1.5, -3.0}, torch::kDouble);
  const at::Tensor expected = (running.to(at::kDouble) * 0.9 + value * 0.1).to(at::kBFloat16);
  update_running(running, value, 0.1);
  EXPECT_TRUE(running.equal(expected));
}

TEST(BatchStatistics, SumsOfGradientsAreThoseOfTheDefinition) {
  const at::Tensor input = torch::randn({3, 2, 4}, torch::kDouble);
  const at::Tensor gradient = torch::randn({3, 2, 4}, torch::kDouble);
  const BatchStatistics statistics = join_statistics(local_statistics(input).unsqueeze(0), input, 1e-5);
  const at::Tensor sums = local_gradient_sums(gradient, input, statistics, 1e-5);
  const at::Tensor normal = (input - statistics.mean.view({1, 2, 1})) * statistics.inverse.view({1, 2, 1});
  EXPECT_TRUE(
      sums.narrow(0, 0, 2).allclose((gradient * normal).sum(at::OptionalIntArrayRef(kAllButChannels)), 1e-12, 1e-12));
  EXPECT_TRUE(sums.narrow(0, 2, 2).allclose(gradient.sum(at::OptionalIntArrayRef(kAllButChannels)), 1e-12, 1e-12));
}

}  // namespace
}  // namespace ds::norm
