// Regions keep less between forward and backward.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "dsengine/activation_checkpoint.h"
#include "profiling/tensor_memory.h"

namespace ds::recompute {
namespace {

// Live bytes after forward, and after backward, of 6 blocks over [256, 64] float32.
std::pair<int64_t, int64_t> live_bytes(bool regions) {
  const profiling::TensorMemory memory;
  const auto block = [](const at::Tensor& t) { return t.exp().sin().tanh().cos().sigmoid(); };
  const at::Tensor begin = torch::ones({256, 64}).requires_grad_(true);
  at::Tensor x = begin;
  for (int i = 0; i < 6; ++i) x = regions ? checkpoint(block, x) : block(x);
  const at::Tensor loss = x.sum();
  x.reset();
  const int64_t after_forward = memory.live_bytes();
  loss.backward();
  return {after_forward, memory.live_bytes()};
}

TEST(CheckpointMemory, OnlyTheInputsOfRegionsLiveUntilBackward) {
  const auto [plain, plain_end] = live_bytes(false);
  const auto [regions, regions_end] = live_bytes(true);
  constexpr int64_t kTensor = 256 * 64 * 4;
  EXPECT_GE(plain, 18 * kTensor);
  EXPECT_LE(regions, 7 * kTensor) << "the inputs of six regions, and small states of generators";
  EXPECT_EQ(regions_end, plain_end) << "nothing of a region outlives its backward";
}

TEST(CheckpointMemory, ADroppedGraphFreesItsRegions) {
  const auto kept = std::make_shared<int>(0);
  const at::Tensor x = torch::ones({4}).requires_grad_(true);
  {
    const at::Tensor out = checkpoint([kept](const at::Tensor& t) { return t.exp(); }, x);
    EXPECT_EQ(kept.use_count(), 2);
  }
  EXPECT_EQ(kept.use_count(), 1);
  const at::Tensor out = checkpoint([kept](const at::Tensor& t) { return t.exp(); }, x);
  out.sum().backward();
  EXPECT_EQ(kept.use_count(), 1);
}

}  // namespace
}  // namespace ds::recompute
