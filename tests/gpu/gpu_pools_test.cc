// Memory of gathered buckets and of gradients, apart from activations; and what happens where there is none left.
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "core/memory/memory_pool.h"
#include "tests/gpu/device_run.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/gpu/tested_device.h"
#include "tests/simulated_gpu/reports.h"
#include "tests/support/thread_ranks.h"

namespace ds::engine {
namespace {

using test::device_is_simulated;
using test::tested_device;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A function of the simulated GPU's library.
template <class Function>
Function* of_simulation(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(::dlopen(std::getenv("DS_CUDA_LIBRARY"), RTLD_NOW), name));
}

int64_t pool_bytes() { return of_simulation<decltype(ds_simulated_gpu_pool_bytes)>("ds_simulated_gpu_pool_bytes")(); }

int64_t pool_trims() { return of_simulation<decltype(ds_simulated_gpu_pool_trims)>("ds_simulated_gpu_pool_trims")(); }

// While it lives, pools have so many bytes more.
class PoolLimit {
 public:
  explicit PoolLimit(int64_t more) { set(more); }
  ~PoolLimit() { set(-1); }
  PoolLimit(const PoolLimit&) = delete;
  PoolLimit& operator=(const PoolLimit&) = delete;

 private:
  static void set(int64_t more) {
    of_simulation<decltype(ds_simulated_gpu_limit_pools)>("ds_simulated_gpu_limit_pools")(more);
  }
};

TEST(GpuPools, BlocksAreMemoryLikeAnyOther) {
  constexpr int64_t kNumel = int64_t{1} << 20;
  const auto options = at::TensorOptions(tested_device()).dtype(at::kFloat);
  at::Tensor kept;
  {
    PooledMemory memory;
    for (int round = 0; round < 3; ++round) {
      at::Tensor buffer = at::empty({0}, options);
      c10::DataPtr block = memory.take(kNumel * sizeof(float), tested_device());
      ASSERT_NE(block.get(), nullptr);
      EXPECT_EQ(block.device(), tested_device());
      buffer.set_(at::Storage(at::Storage::use_byte_size_t(), kNumel * sizeof(float), std::move(block)), 0, {kNumel},
                  {1});
      buffer.fill_(round);
      EXPECT_TRUE(buffer.eq(round).all().item<bool>());
      if (round == 1) memory.trim();
      kept = buffer;
    }
  }
  EXPECT_TRUE(kept.eq(2).all().item<bool>()) << "a block outlives its pool";
}

// What LibTorch's allocator has of the device.
int64_t reserved_bytes() {
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(tested_device().index()).reserved_bytes[kAll].current;
}

TEST(GpuPools, FreeMemoryGoesBackToTheDevice) {
  if (!tested_device().is_cuda() || device_is_simulated()) GTEST_SKIP() << "asks LibTorch's allocator of a GPU";
  constexpr size_t kBytes = size_t{64} << 20;
  const at::Tensor first = at::empty({1}, at::TensorOptions(tested_device()));
  const int64_t before = reserved_bytes();
  {
    PooledMemory memory;
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 3; ++i) memory.take(kBytes, tested_device());
      EXPECT_GE(reserved_bytes(), before + static_cast<int64_t>(kBytes)) << "kept for the next block";
      memory.trim();
      EXPECT_EQ(reserved_bytes(), before) << "round " << round;
    }
    memory.take(kBytes, tested_device());
  }
  EXPECT_EQ(reserved_bytes(), before) << "the pool has ended";
  c10::DataPtr kept;
  {
    PooledMemory memory;
    kept = memory.take(kBytes, tested_device());
  }
  EXPECT_GE(reserved_bytes(), before + static_cast<int64_t>(kBytes));
  kept.clear();
  c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
  EXPECT_LE(reserved_bytes(), before);
}

TEST(GpuPools, TrimsReachThem) {
  if (!device_is_simulated()) GTEST_SKIP() << "counted by the simulated GPU";
  PooledMemory memory;
  const int64_t before = pool_trims();
  memory.trim();
  EXPECT_EQ(pool_trims(), before) << "nothing was taken";
  memory.take(512, tested_device());
  memory.trim();
  EXPECT_EQ(pool_trims(), before + 1);
}

std::shared_ptr<Engine> engine_of(SmallNet& model, int stage, comm::Communicator& ranks, at::Device device) {
  return initialize({.model = model.ptr(),
                     .config = device_config(stage, "bf16"),
                     .communicator = borrowed(ranks),
                     .device = device.str()})
      .engine;
}

TEST(GpuPools, GatheredBucketsAndGradientsComeFromThem) {
  if (!device_is_simulated()) GTEST_SKIP() << "counted by the simulated GPU";
  for (const int stage : {2, 3}) {
    test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
      SmallNet model;
      const auto engine = engine_of(model, stage, ranks, device);
      const at::Tensor x = sample(0, ranks.rank()).to(device);
      ranks.barrier();
      EXPECT_EQ(pool_bytes(), 0) << "stage " << stage;
      ranks.barrier();
      const at::Tensor loss = model->loss(x);
      if (stage == 3) EXPECT_GT(pool_bytes(), 0) << "parameters of the last layer are there";
      engine->backward(loss);
      ranks.barrier();
      if (stage == 2) EXPECT_GT(pool_bytes(), 0) << "gradients of the next micro-batch fill what is there";
      engine->step();
    });
    EXPECT_EQ(pool_bytes(), 0) << "stage " << stage;
  }
}

// The operator has nothing to read, and the engine says why: on all ranks, which have as little memory.
TEST(GpuPools, WithoutMemoryForABucketTheOperatorFailsAndTheEngineSaysWhy) {
  if (!device_is_simulated()) GTEST_SKIP() << "only pools of the simulated GPU have a limit that a test sets";
  test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
    SmallNet model;
    const auto engine = engine_of(model, 3, ranks, device);
    const at::Tensor x = sample(0, ranks.rank()).to(device);
    ranks.barrier();
    std::unique_ptr<PoolLimit> limit;
    if (ranks.rank() == 0) limit = std::make_unique<PoolLimit>(16);
    ranks.barrier();
    EXPECT_THROW(model->loss(x), c10::Error);
    const at::Tensor other = at::ones({}, at::TensorOptions(device)).requires_grad_(true) * 2.0;
    EXPECT_THAT([&] { engine->backward(other); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr("no memory for parameters of bucket"), HasSubstr("stage3_max_live_parameters"))));
    ranks.barrier();
  });
}

// In a hook of autograd, which hands it to the caller of backward(). The program may go on with less.
TEST(GpuPools, WithoutMemoryForGradientsBackwardThrows) {
  if (!device_is_simulated()) GTEST_SKIP() << "only pools of the simulated GPU have a limit that a test sets";
  test::on_gpus(2, [&](comm::Communicator& ranks, at::Device device) {
    SmallNet model;
    const auto engine = engine_of(model, 2, ranks, device);
    const at::Tensor x = sample(0, ranks.rank()).to(device);
    const at::Tensor loss = model->loss(x);
    ranks.barrier();
    {
      std::unique_ptr<PoolLimit> limit;
      if (ranks.rank() == 0) limit = std::make_unique<PoolLimit>(16);
      ranks.barrier();
      EXPECT_THROW(engine->backward(loss), c10::OutOfMemoryError);
      ranks.barrier();
    }
    ranks.barrier();
    engine->zero_grad();
    for (int micro = 0; micro < 2; ++micro) {
      engine->backward(model->loss(x));
      engine->step();
    }
    EXPECT_TRUE(engine->was_step_applied());
  });
}

}  // namespace
}  // namespace ds::engine
