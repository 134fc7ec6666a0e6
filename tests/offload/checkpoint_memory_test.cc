// Regions keep less between forward and backward. Counts what LibTorch's CPU allocator reports on this thread.
#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "offload/activation_checkpoint.h"

namespace ds::offload {
namespace {

class LiveBytes : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* /*ptr*/, int64_t alloc_size, size_t /*total_allocated*/, size_t /*total_reserved*/,
                         c10::Device /*device*/) override {
    live_ += alloc_size;
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t live() const { return live_; }

 private:
  int64_t live_ = 0;
};

// Live bytes after forward, and after backward, of 6 blocks over [256, 64] float32.
std::pair<int64_t, int64_t> live_bytes(bool regions) {
  const auto count = std::make_shared<LiveBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, count);
  const auto block = [](const at::Tensor& t) { return t.exp().sin().tanh().cos().sigmoid(); };
  const at::Tensor begin = torch::ones({256, 64}).requires_grad_(true);
  at::Tensor x = begin;
  for (int i = 0; i < 6; ++i) x = regions ? checkpoint(block, x) : block(x);
  const at::Tensor loss = x.sum();
  x.reset();
  const int64_t after_forward = count->live();
  loss.backward();
  return {after_forward, count->live()};
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
}  // namespace ds::offload
