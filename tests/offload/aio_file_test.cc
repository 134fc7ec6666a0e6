// Files for direct IO: what was written is read, in every mode, and what is refused.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>

#include "core/check.h"
#include "offload/aio_file.h"
#include "tests/offload/aligned_memory.h"
#include "tests/offload/open_descriptors.h"
#include "tests/support/scratch_folder.h"

namespace ds::offload {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kBlock = AioFile::alignment();
constexpr const char* kWhat = "zero_optimization.offload_optimizer.nvme_path";

struct Mode {
  const char* name;
  AioOptions options;
};

class AioFileModes : public testing::TestWithParam<Mode> {
 protected:
  std::unique_ptr<AioFile> open(int64_t bytes) const {
    return std::make_unique<AioFile>(folder_.path().string(), "state", bytes, GetParam().options, kWhat);
  }

 private:
  test::ScratchFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(
    Options, AioFileModes,
    testing::Values(Mode{"Defaults", {}}, Mode{"SmallBlocks", {.block_size = 2 * kBlock, .queue_depth = 3}},
                    Mode{"OneAtATime", {.block_size = kBlock, .queue_depth = 1}},
                    Mode{"SingleSubmit", {.block_size = 2 * kBlock, .queue_depth = 3, .single_submit = true}},
                    Mode{"NoOverlap", {.block_size = 2 * kBlock, .queue_depth = 3, .overlap_events = false}},
                    Mode{"Neither",
                         {.block_size = kBlock, .queue_depth = 2, .single_submit = true, .overlap_events = false}}),
    [](const auto& mode) { return mode.param.name; });

TEST_P(AioFileModes, ReadsWhatWasWritten) {
  const auto opened = open(60 * kBlock);
  AioFile& file = *opened;
  for (const auto& [block, blocks] : {std::pair{3, 1}, {5, 2}, {10, 17}, {40, 20}}) {
    const at::Tensor written = random_bytes(blocks * kBlock);
    file.wait(file.write(block * kBlock, written.data_ptr(), written.numel()));
    const at::Tensor read = random_bytes(blocks * kBlock);
    file.wait(file.read(block * kBlock, read.data_ptr(), read.numel()));
    EXPECT_TRUE(read.equal(written)) << block;
  }
  const at::Tensor between = random_bytes(3 * kBlock);
  file.wait(file.read(7 * kBlock, between.data_ptr(), between.numel()));
  EXPECT_EQ(between.count_nonzero().item<int64_t>(), 0);
}

TEST_P(AioFileModes, ManyTransfersAtOnceWaitedForInAnyOrder) {
  constexpr int kTransfers = 20;
  const auto opened = open(kTransfers * 9 * kBlock);
  AioFile& file = *opened;
  const at::Tensor written = random_bytes(file.bytes());
  const at::Tensor read = aligned_bytes(file.bytes());
  auto* const from = written.data_ptr<uint8_t>();
  auto* const into = read.data_ptr<uint8_t>();
  std::vector<AioFile::Ticket> tickets;
  for (int i = 0; i < kTransfers; ++i) tickets.push_back(file.write(i * 9 * kBlock, from + i * 9 * kBlock, 9 * kBlock));
  for (int i = kTransfers; i-- > 0;) file.wait(tickets[i]);
  tickets.clear();
  for (int i = 0; i < kTransfers; ++i) tickets.push_back(file.read(i * 9 * kBlock, into + i * 9 * kBlock, 9 * kBlock));
  for (int i = 1; i < kTransfers; i += 2) file.wait(tickets[i]);
  for (int i = 0; i < kTransfers; i += 2) {
    while (!file.done(tickets[i])) std::this_thread::yield();
    file.wait(tickets[i]);
  }
  EXPECT_TRUE(read.equal(written));
}

TEST_P(AioFileModes, WaitsForWhatIsInFlightWhenDestroyed) {
  auto file = open(40 * kBlock);
  const at::Tensor written = random_bytes(file->bytes());
  file->wait(file->write(0, written.data_ptr(), written.numel()));
  const at::Tensor read = aligned_bytes(file->bytes());
  read.zero_();
  file->read(0, read.data_ptr(), read.numel());
  file.reset();
  EXPECT_TRUE(read.equal(written));
}

AioFile small_file(const test::ScratchFolder& folder, int64_t bytes, const AioOptions& options = {}) {
  return {folder.path().string(), "state", bytes, options, kWhat};
}

TEST(AioFile, MoreRequestsThanTheKernelsQueueHolds) {
  const test::ScratchFolder folder;
  AioFile file = small_file(folder, 5000 * kBlock, {.block_size = kBlock, .queue_depth = 16});
  const at::Tensor written = random_bytes(file.bytes());
  const at::Tensor read = aligned_bytes(file.bytes());
  file.wait(file.write(0, written.data_ptr(), written.numel()));
  const auto first = file.read(0, read.data_ptr(), read.numel() / 2);
  const auto second =
      file.read(read.numel() / 2, read.data_ptr<uint8_t>() + read.numel() / 2, read.numel() - read.numel() / 2);
  file.wait(second);
  file.wait(first);
  EXPECT_TRUE(read.equal(written));
}

TEST(AioFile, TransfersMoveWithoutFurtherCalls) {
  const test::ScratchFolder folder;
  AioFile file = small_file(folder, 64 * kBlock, {.block_size = kBlock, .queue_depth = 2});
  const at::Tensor ones = aligned_bytes(file.bytes()).fill_(1);
  file.wait(file.write(0, ones.data_ptr(), ones.numel()));
  const at::Tensor read = aligned_bytes(file.bytes()).zero_();
  const auto ticket = file.read(0, read.data_ptr(), read.numel());
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!read.equal(ones) && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
  EXPECT_TRUE(read.equal(ones));
  file.wait(ticket);
}

TEST(AioFile, ATransferOutlivesTheThreadThatStartedIt) {
  const test::ScratchFolder folder;
  AioFile file = small_file(folder, 512 * kBlock, {.block_size = kBlock, .queue_depth = 2});
  const at::Tensor written = random_bytes(file.bytes());
  const at::Tensor read = aligned_bytes(file.bytes()).zero_();
  AioFile::Ticket ticket = 0;
  std::thread([&] { ticket = file.write(0, written.data_ptr(), written.numel()); }).join();
  file.wait(ticket);
  std::thread([&] { ticket = file.read(0, read.data_ptr(), read.numel()); }).join();
  file.wait(ticket);
  EXPECT_TRUE(read.equal(written));
}

TEST(AioFile, BeginsAsZerosOfWholeBlocks) {
  const test::ScratchFolder folder;
  AioFile file = small_file(folder, 5 * kBlock + 1);
  EXPECT_EQ(file.bytes(), 6 * kBlock);
  const at::Tensor read = random_bytes(file.bytes());
  file.wait(file.read(0, read.data_ptr(), read.numel()));
  EXPECT_EQ(read.count_nonzero().item<int64_t>(), 0);
}

TEST(AioFile, HasNoName) {
  const test::ScratchFolder folder;
  const AioFile file = small_file(folder, kBlock);
  EXPECT_THAT(file.path(), HasSubstr(folder / "state"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(AioFile, WhatAKilledProcessLeftIsNoObstacle) {
  const test::ScratchFolder folder;
  folder.write(cat("state.", ::getpid()), "old");
  const AioFile file = small_file(folder, kBlock);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(AioFile, RefusesWhatIsNotAligned) {
  const test::ScratchFolder folder;
  AioFile file = small_file(folder, 4 * kBlock);
  const at::Tensor memory = aligned_bytes(8 * kBlock);
  auto* const bytes = memory.data_ptr<uint8_t>();
  const auto refused = ThrowsMessage<UsageError>(HasSubstr("multiples of 4096"));
  EXPECT_THAT([&] { file.read(512, bytes, kBlock); }, refused);
  EXPECT_THAT([&] { file.read(0, bytes + 64, kBlock); }, refused);
  EXPECT_THAT([&] { file.write(0, bytes, 100); }, refused);
  EXPECT_THAT([&] { file.write(3 * kBlock, bytes, 2 * kBlock); },
              ThrowsMessage<UsageError>(HasSubstr("expected a part of the file's 16384 bytes")));
  EXPECT_THAT([&] { file.read(-kBlock, bytes, kBlock); }, ThrowsMessage<UsageError>(HasSubstr("a part of the file's")));
  const auto ticket = file.read(0, bytes, kBlock);
  file.wait(ticket);
  EXPECT_THAT([&] { file.wait(ticket); }, ThrowsMessage<UsageError>(HasSubstr("wait for each ticket once")));
}

TEST(AioFile, RefusesOptionsThatDoNotFit) {
  const test::ScratchFolder folder;
  EXPECT_THAT([&] { small_file(folder, kBlock, {.block_size = 1000}); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("aio.block_size"), HasSubstr("4096"), HasSubstr("1000"))));
  EXPECT_THAT([&] { small_file(folder, kBlock, {.queue_depth = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("aio.queue_depth")));
  EXPECT_THAT([&] { small_file(folder, kBlock, {.intra_op_parallelism = 0}); },
              ThrowsMessage<ConfigError>(HasSubstr("aio.intra_op_parallelism")));
}

TEST(AioFile, RefusesFoldersThatAreNoDisk) {
  const test::ScratchFolder folder;
  const auto open_in = [](const std::string& path, int64_t bytes = kBlock) {
    return [path, bytes] { AioFile(path, "state", bytes, {}, kWhat); };
  };
  const auto error = [](const auto& text) { return ThrowsMessage<ConfigError>(AllOf(HasSubstr(kWhat), text)); };
  EXPECT_THAT(open_in(folder / "none"), error(AllOf(HasSubstr(folder / "none"), HasSubstr("make the folder"))));
  EXPECT_THAT(open_in(folder.write("file", "")), error(HasSubstr("expected a folder")));
  EXPECT_THAT(open_in(folder / "file/below"), error(HasSubstr("existing folder")));
  EXPECT_THAT(open_in("/proc"), error(HasSubstr("cannot make a file in \"/proc\"")));
  EXPECT_THAT(open_in("/dev/shm"), error(HasSubstr("lives in memory")));
  EXPECT_THAT(open_in(folder.path().string(), int64_t{1} << 50),
              error(AllOf(HasSubstr("needed 1125899906842624 bytes"), HasSubstr("free"), HasSubstr("larger disk"))));
  EXPECT_THAT(open_descriptors_of("state."), testing::IsEmpty());
}

TEST(AioFile, AFileThatBecameShorterFailsTheRead) {
  const test::ScratchFolder folder;
  AioFile file = small_file(folder, 64 * kBlock, {.block_size = 4 * kBlock, .queue_depth = 3});
  const at::Tensor written = random_bytes(file.bytes());
  file.wait(file.write(0, written.data_ptr(), written.numel()));
  truncate_descriptor(open_descriptors_of(file.path()).at(0), 10 * kBlock);
  const at::Tensor read = aligned_bytes(file.bytes());
  const auto lost = file.read(0, read.data_ptr(), read.numel());
  EXPECT_THAT([&] { file.wait(lost); },
              ThrowsMessage<IoError>(AllOf(HasSubstr(file.path()), HasSubstr("cannot read"), HasSubstr("at offset"),
                                           HasSubstr("became shorter"))));
  file.wait(file.read(0, read.data_ptr(), 10 * kBlock));
  EXPECT_TRUE(read.slice(0, 0, 10 * kBlock).equal(written.slice(0, 0, 10 * kBlock)));
}

}  // namespace
}  // namespace ds::offload
