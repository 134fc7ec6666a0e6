#include "zero/gather_memory.h"

#include <gtest/gtest.h>

namespace ds::zero {
namespace {

constexpr size_t kBlock = 1 << 20;

TEST(GatherMemory, BlocksGoFromOneBucketToTheNext) {
  GatherMemory memory;
  c10::DataPtr first = memory.take(kBlock, at::kCPU);
  const void* const address = first.get();
  memory.give_back(std::move(first), kBlock);
  EXPECT_EQ(memory.free_bytes(), kBlock);
  const c10::DataPtr second = memory.take(kBlock, at::kCPU);
  EXPECT_EQ(second.get(), address);
  EXPECT_EQ(memory.free_bytes(), 0);
}

TEST(GatherMemory, FreeBlocksOfAnotherSizeMakeWay) {
  GatherMemory memory;
  memory.give_back(memory.take(kBlock, at::kCPU), kBlock);
  memory.give_back(memory.take(kBlock / 2, at::kCPU), kBlock / 2);  // fits beside nothing: one block was the most
  EXPECT_EQ(memory.free_bytes(), kBlock / 2);
}

TEST(GatherMemory, AStepKeepsWhatTheLastOneNeeded) {
  GatherMemory memory;
  {
    c10::DataPtr a = memory.take(kBlock, at::kCPU);
    c10::DataPtr b = memory.take(kBlock, at::kCPU);
    memory.give_back(std::move(a), kBlock);
    memory.give_back(std::move(b), kBlock);
  }
  memory.lend_to_kernel();
  EXPECT_EQ(memory.free_bytes(), 2 * kBlock);
  memory.give_back(memory.take(kBlock, at::kCPU), kBlock);
  memory.lend_to_kernel();
  EXPECT_EQ(memory.free_bytes(), kBlock);
  const c10::DataPtr again = memory.take(kBlock, at::kCPU);
  static_cast<char*>(again.get())[kBlock - 1] = 1;  // writable
  memory.clear();
  EXPECT_EQ(memory.free_bytes(), 0);
}

}  // namespace
}  // namespace ds::zero
