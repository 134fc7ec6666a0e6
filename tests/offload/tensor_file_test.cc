// Tensors in a file, one by one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "core/check.h"
#include "offload/tensor_file.h"
#include "tests/offload/aligned_memory.h"
#include "tests/support/scratch_folder.h"

namespace ds::offload {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::unique_ptr<AioFile> file_of(const test::ScratchFolder& folder, int64_t bytes) {
  return std::make_unique<AioFile>(folder.path().string(), "parameters", bytes, AioOptions{},
                                   "zero_optimization.offload_param.nvme_path");
}

// Floats with memory for whole blocks.
at::Tensor floats(int64_t numel) { return aligned_bytes(numel * 4).view(at::kFloat).slice(0, 0, numel); }

TEST(TensorFile, TensorsOfOddSizesGoAndCome) {
  const std::vector<int64_t> numels{1, 1024, 1025, 30'001};
  std::vector<int64_t> sizes;
  for (const int64_t numel : numels) sizes.push_back(numel * 4);
  EXPECT_EQ(TensorFile::file_bytes(sizes), 4096 + 4096 + 8192 + 122'880);
  const test::ScratchFolder folder;
  TensorFile file(file_of(folder, TensorFile::file_bytes(sizes)), sizes);
  std::vector<at::Tensor> written;
  std::vector<AioFile::Ticket> tickets;
  for (size_t i = 0; i < numels.size(); ++i) {
    written.push_back(floats(numels[i]).normal_());
    tickets.push_back(file.start_write(static_cast<int64_t>(i), written.back()));
  }
  for (const auto ticket : tickets) file.wait(ticket);
  for (size_t i = numels.size(); i-- > 0;) {
    const at::Tensor read = floats(numels[i]).zero_();
    file.wait(file.start_read(static_cast<int64_t>(i), read));
    EXPECT_TRUE(read.equal(written[i])) << i;
  }
}

TEST(TensorFile, RefusesTensorsThatDoNotFit) {
  const test::ScratchFolder folder;
  TensorFile file(file_of(folder, 8192), {40, 4000});
  EXPECT_THAT([&] { file.start_read(2, floats(10)); }, ThrowsMessage<UsageError>(HasSubstr("a tensor from 0 to 1")));
  EXPECT_THAT([&] { file.start_read(0, floats(11)); }, ThrowsMessage<UsageError>(HasSubstr("tensor of 40 bytes")));
  EXPECT_THAT([&] { file.start_read(0, torch::zeros({10})); },
              ThrowsMessage<UsageError>(HasSubstr("expected a storage with 4096 bytes")));
  EXPECT_THAT(
      [&] {
        TensorFile(file_of(folder, 8192), {40, 4000, 1});
      },
      ThrowsMessage<UsageError>(HasSubstr("TensorFile::file_bytes(sizes) = 12288")));
}

}  // namespace
}  // namespace ds::offload
