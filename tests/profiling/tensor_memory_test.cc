#include "profiling/tensor_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ds::profiling {
namespace {

constexpr int64_t kKibi = 1024;

TEST(TensorMemory, CountsWhatLivesAndTheMostOfIt) {
  const at::Tensor before = torch::zeros({kKibi});
  TensorMemory memory;
  at::Tensor kept = torch::zeros({kKibi});
  { const at::Tensor dropped = torch::zeros({3 * kKibi}); }
  EXPECT_EQ(memory.live_bytes(), 4 * kKibi);
  EXPECT_EQ(memory.take_peak_bytes(), 16 * kKibi);
  EXPECT_EQ(memory.take_peak_bytes(), 4 * kKibi);
  kept.reset();
  EXPECT_EQ(memory.live_bytes(), 0);
}

TEST(TensorMemory, SeesWhatBackwardAllocates) {
  const at::Tensor x = torch::ones({kKibi}, torch::requires_grad());
  const TensorMemory memory;
  const at::Tensor loss = (x * x).sum();
  EXPECT_GE(memory.live_bytes(), 4);
  loss.backward();
  EXPECT_GE(memory.live_bytes(), 4 * kKibi + 4);  // the gradient
}

TEST(TensorMemory, EndsWithTheObject) {
  { const TensorMemory memory; }
  const TensorMemory outer;
  {
    const TensorMemory inner;
    const at::Tensor x = torch::zeros({kKibi});
    EXPECT_EQ(inner.live_bytes(), 4 * kKibi);
  }
  const int64_t live = outer.live_bytes();
  const at::Tensor y = torch::zeros({kKibi});
  EXPECT_EQ(outer.live_bytes() - live, 4 * kKibi);
}

}  // namespace
}  // namespace ds::profiling
