// Reduced gradients on the host, in place and by way of staging tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "core/check.h"
#include "offload/host_gradients.h"

namespace ds::offload {
namespace {

// 0: added in place; else that many stagings, as from a device.
class HostGradientsWays : public ::testing::TestWithParam<int> {
 protected:
  HostGradients make(const std::vector<at::Tensor>& slices, at::ScalarType dtype = at::kFloat) {
    std::vector<at::Tensor> stagings;
    for (int i = 0; i < GetParam(); ++i) stagings.push_back(torch::full({300}, NAN, dtype));
    return HostGradients(slices, at::kCPU, std::move(stagings));
  }
};

INSTANTIATE_TEST_SUITE_P(InPlaceAndStaged, HostGradientsWays, ::testing::Values(0, 1, 2, 3));

TEST_P(HostGradientsWays, TheFirstIsCopiedAndLaterOnesAreAdded) {
  const at::Tensor slice = torch::full({100}, NAN);  // what was there before does not count
  HostGradients gradients = make({slice});
  EXPECT_FALSE(gradients.gradient(0).defined());
  at::Tensor expected = torch::zeros({100});
  for (int micro_batch = 0; micro_batch < 5; ++micro_batch) {
    at::Tensor own = torch::randn({100});
    expected += own;
    gradients.add(0, own);
    own.fill_(NAN);  // the reducer reuses its memory
  }
  EXPECT_TRUE(at::equal(gradients.gradient(0), expected)) << "added in order";
  EXPECT_EQ(gradients.gradient(0).data_ptr(), slice.data_ptr());
}

TEST_P(HostGradientsWays, BucketsOfSeveralLengthsDoNotMix) {
  const std::vector<int64_t> lengths{300, 17, 128, 1};
  std::vector<at::Tensor> slices;
  std::vector<at::Tensor> expected;
  for (const int64_t length : lengths) {
    slices.push_back(torch::empty({length}));
    expected.push_back(torch::zeros({length}));
  }
  HostGradients gradients = make(slices);
  // As backward does: from the last bucket to the first, for each micro-batch.
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
    for (size_t bucket = lengths.size(); bucket-- > 0;) {
      const at::Tensor own = torch::randn({lengths[bucket]});
      expected[bucket] += own;
      gradients.add(bucket, own);
    }
    const size_t read = static_cast<size_t>(micro_batch);
    EXPECT_TRUE(at::equal(gradients.gradient(read), expected[read])) << "read in between, and added to afterwards";
  }
  for (size_t bucket = 0; bucket < lengths.size(); ++bucket)
    EXPECT_TRUE(at::equal(gradients.gradient(bucket), expected[bucket])) << bucket;
}

TEST_P(HostGradientsWays, ClearedOnesBeginAnew) {
  HostGradients gradients = make({torch::empty({10}), torch::empty({10})});
  gradients.add(0, torch::ones({10}));
  gradients.add(0, torch::ones({10}));  // dropped with the rest, also if it is still in a staging
  gradients.clear();
  EXPECT_FALSE(gradients.gradient(0).defined());
  gradients.add(0, torch::full({10}, 5.0));
  EXPECT_FALSE(gradients.gradient(1).defined());
  for (int i = 0; i < 4; ++i) gradients.add(1, torch::ones({10}));
  EXPECT_EQ(gradients.gradient(0).sum().item<double>(), 50.0);
  EXPECT_EQ(gradients.gradient(1).sum().item<double>(), 40.0);
}

TEST_P(HostGradientsWays, KeepsTheGradientDtype) {
  HostGradients gradients = make({torch::empty({64}, at::kBFloat16)}, at::kBFloat16);
  const at::Tensor one = torch::randn({64}).to(at::kBFloat16);
  const at::Tensor two = torch::randn({64}).to(at::kBFloat16);
  gradients.add(0, one);
  gradients.add(0, two);
  EXPECT_TRUE(at::equal(gradients.gradient(0), one + two));
}

TEST_P(HostGradientsWays, WhatIsNotOffloadedIsRefused) {
  HostGradients gradients = make({at::Tensor(), torch::empty({4})});
  EXPECT_FALSE(gradients.takes(0));
  EXPECT_TRUE(gradients.takes(1));
  EXPECT_THROW(gradients.add(0, torch::ones({4})), InternalError);
  EXPECT_THROW(gradients.add(1, torch::ones({5})), InternalError);
  EXPECT_FALSE(gradients.gradient(1).defined()) << "a refused gradient was not added";
}

TEST(HostGradients, StagingsMustHoldEverySlice) {
  EXPECT_THROW(HostGradients({torch::empty({8})}, at::kCPU, {torch::empty({7})}), InternalError);
  EXPECT_THROW(HostGradients({torch::empty({2, 4})}, at::kCPU, {}), InternalError);
}

}  // namespace
}  // namespace ds::offload
