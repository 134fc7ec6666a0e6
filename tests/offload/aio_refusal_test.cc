// A file whose requests the kernel refuses: nothing that was asked for may move later.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "offload/aio_file.h"
#include "offload/slice_swapper.h"
#include "tests/offload/aligned_memory.h"
#include "tests/support/scratch_folder.h"

struct io_uring;

namespace ds::offload {
namespace {

std::atomic<int> refusal{0};  // errno of every submission; 0: the kernel answers

}  // namespace
}  // namespace ds::offload

// In the place of liburing's.
extern "C" __attribute__((visibility("default"))) int io_uring_submit_and_wait(io_uring* ring, unsigned answers) {
  if (const int error = ds::offload::refusal; error != 0) return -error;
  using Submit = int (*)(io_uring*, unsigned);
  static const auto submit = reinterpret_cast<Submit>(::dlsym(RTLD_NEXT, "io_uring_submit_and_wait"));
  return submit(ring, answers);
}

namespace ds::offload {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kPart = int64_t{4} << 20;

struct Refusal {
  explicit Refusal(int error) { refusal = error; }
  ~Refusal() { refusal = 0; }
  Refusal(const Refusal&) = delete;
  Refusal& operator=(const Refusal&) = delete;
};

std::unique_ptr<AioFile> file_of_ones(const test::ScratchFolder& folder, bool single_submit) {
  auto file = std::make_unique<AioFile>(
      folder.path().string(), "state", 2 * kPart,
      AioOptions{.block_size = AioFile::alignment() * 4, .queue_depth = 4, .single_submit = single_submit},
      "zero_optimization.offload_optimizer.nvme_path");
  const at::Tensor ones = aligned_bytes(2 * kPart).fill_(1);
  file->wait(file->write(0, ones.data_ptr(), ones.numel()));
  return file;
}

void expect_given_up(AioFile& file, AioFile::Ticket ticket, const at::Tensor& memory) {
  const auto given_up = ThrowsMessage<IoError>(AllOf(HasSubstr(file.path()), HasSubstr("is given up")));
  EXPECT_THAT([&] { file.read(0, memory.data_ptr(), kPart); }, given_up);
  EXPECT_THAT([&] { file.write(0, memory.data_ptr(), kPart); }, given_up);
  EXPECT_THAT([&] { file.done(ticket); }, given_up);
  EXPECT_THAT([&] { file.wait(ticket); }, given_up);
}

TEST(AioRefusal, WhatWasPutOffNeverMovesOnceItIsGivenUp) {
  for (const bool single_submit : {false, true}) {
    const test::ScratchFolder folder;
    auto file = file_of_ones(folder, single_submit);
    const at::Tensor memory = aligned_bytes(kPart);
    AioFile::Ticket ticket = 0;
    {
      const Refusal busy(EBUSY);
      ticket = file->read(0, memory.data_ptr(), kPart);
      refusal = EINVAL;
      EXPECT_THAT([&] { file->wait(ticket); }, ThrowsMessage<IoError>(HasSubstr("Invalid argument")));
    }
    memory.fill_(2);
    expect_given_up(*file, ticket, memory);
    file.reset();
    EXPECT_TRUE(memory.eq(2).all().item<bool>());
  }
}

TEST(AioRefusal, WhatIsInFlightIsWaitedForBeforeItIsGivenUp) {
  const test::ScratchFolder folder;
  auto file = file_of_ones(folder, false);
  const at::Tensor moving = aligned_bytes(kPart);
  const at::Tensor refused = aligned_bytes(kPart);
  const AioFile::Ticket ticket = file->read(0, moving.data_ptr(), kPart);
  {
    const Refusal refuse(EINVAL);
    EXPECT_THROW(file->read(kPart, refused.data_ptr(), kPart), IoError);
  }
  moving.fill_(2);
  refused.fill_(2);
  expect_given_up(*file, ticket, refused);
  file.reset();
  EXPECT_TRUE(moving.eq(2).all().item<bool>());
  EXPECT_TRUE(refused.eq(2).all().item<bool>());
}

TEST(AioRefusal, ASwapperUsesNoSliceOfAFileThatIsGivenUp) {
  const test::ScratchFolder folder;
  SliceSwapper swapper(file_of_ones(folder, false), aligned_bytes(kPart), 1);
  for (int slice = 0; slice < 2; ++slice) swapper.add({torch::full({kPart}, slice, at::kByte)});
  swapper.flush();
  int uses = 0;
  const auto use = [&](int64_t /*slice*/) { ++uses; };
  {
    const Refusal refuse(EINVAL);
    EXPECT_THROW(swapper.with(0, false, use), IoError);
  }
  const auto given_up = ThrowsMessage<IoError>(HasSubstr("is given up"));
  EXPECT_THAT([&] { swapper.with(1, false, use); }, given_up);
  EXPECT_THAT([&] { swapper.for_each({0, 1}, use); }, given_up);
  EXPECT_EQ(uses, 0);
}

}  // namespace
}  // namespace ds::offload
