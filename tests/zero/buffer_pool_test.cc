#include "zero/buffer_pool.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace ds::zero {
namespace {

TEST(BufferPool, ABufferGoesToTheNextBucketThatFitsIntoIt) {
  BufferPool pool;
  const at::Tensor large = pool.take(100, at::kFloat);
  const void* const memory = large.data_ptr();
  pool.give_back(large);
  const at::Tensor small = pool.take(40, at::kFloat);
  EXPECT_EQ(small.data_ptr(), memory);
  EXPECT_EQ(small.numel(), 40);
  pool.give_back(small);
  EXPECT_EQ(pool.take(100, at::kFloat).data_ptr(), memory) << "all of it came back";
  EXPECT_EQ(pool.take_peak_bytes(), 400);
}

TEST(BufferPool, OneThatIsTooSmallIsReplaced) {
  BufferPool pool;
  pool.give_back(pool.take(10, at::kFloat));
  EXPECT_EQ(pool.take(20, at::kFloat).numel(), 20);
  EXPECT_EQ(pool.take_peak_bytes(), 80);
}

TEST(BufferPool, ThreeOfTheLargestStayFree) {
  BufferPool pool;
  std::vector<at::Tensor> buffers;
  for (const int64_t numel : {10, 50, 20, 40, 30}) buffers.push_back(pool.take(numel, at::kFloat));
  EXPECT_EQ(pool.take_peak_bytes(), 150 * 4);
  for (const at::Tensor& buffer : buffers) pool.give_back(buffer);
  EXPECT_EQ(pool.take_peak_bytes(), 150 * 4);
  EXPECT_EQ(pool.take_peak_bytes(), (50 + 40 + 30) * 4);
}

TEST(BufferPool, CountsWhatDoesNotComeFromItUntilItIsCleared) {
  BufferPool pool;
  pool.give_back(pool.take(10, at::kFloat));
  pool.count(1000);
  pool.count(-600);
  EXPECT_EQ(pool.take_peak_bytes(), 1040);
  EXPECT_EQ(pool.take_peak_bytes(), 440);
  pool.clear();
  pool.take_peak_bytes();
  EXPECT_EQ(pool.take_peak_bytes(), 0);
}

}  // namespace
}  // namespace ds::zero
