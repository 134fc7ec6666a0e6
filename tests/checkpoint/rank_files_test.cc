// The files of one rank: names, contents, and use in the wrong order.
#include "checkpoint/rank_files.h"

#include <filesystem>
#include <string>

#include "checkpoint/block_checksum.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

PlannedPiece piece_of(const std::string& path, const at::Tensor& whole, int64_t offset, int64_t length) {
  return {path, {.dtype = whole.scalar_type(), .sizes = whole.sizes().vec()}, offset, length};
}

TEST(RankFiles, OtherProgramsReadThem) {
  const test::ScratchFolder folder;
  const at::Tensor weight = torch::arange(12, torch::kFloat).view({3, 4});
  const at::Tensor count = torch::tensor(5, torch::kLong);
  RankFiles files(folder.path().string(), 1, 12,
                  {piece_of("weights/w", weight, 0, 12), piece_of("weights/cut", weight, 5, 4),
                   piece_of("buffers/count", count, 0, 1), piece_of("optimizer/exp_avg/w", weight, 0, 12),
                   piece_of("ranks/1/rng.cpu", torch::ones({3}, torch::kByte), 0, 3),
                   piece_of("weights/none", torch::empty({0, 7}), 0, 0)});
  files.write(3, weight * 2);
  files.write(0, weight);
  files.write(2, count);
  files.write(1, weight.view({-1}).narrow(0, 5, 4));
  files.write(4, torch::ones({3}, torch::kByte));
  const Index index = files.finish();
  EXPECT_EQ(index.files.size(), 3U);
  const SafetensorsFile weights(folder / "weights-00001-of-00012.safetensors");
  EXPECT_EQ(weights.metadata().at("format"), "pt");
  EXPECT_TRUE(torch::equal(weights.tensor("w"), weight));
  EXPECT_TRUE(torch::equal(weights.tensor("cut@5"), torch::arange(5, 9, torch::kFloat)));
  EXPECT_TRUE(torch::equal(weights.tensor("count"), count));
  EXPECT_EQ(weights.tensor("none").sizes(), (std::vector<int64_t>{0, 7}));
  const SafetensorsFile optimizer(folder / "optimizer-00001-of-00012.safetensors");
  EXPECT_TRUE(torch::equal(optimizer.tensor("optimizer/exp_avg/w"), weight * 2));
  EXPECT_TRUE(std::filesystem::exists(folder / "ranks-00001-of-00012.safetensors"));
  for (const auto& [name, record] : index.files) EXPECT_EQ(record.bytes, std::filesystem::file_size(folder / name));
}

TEST(RankFiles, AChecksumForEveryBlock) {
  const test::ScratchFolder folder;
  const int64_t block = kChecksumBlock / sizeof(float);
  const at::Tensor values = torch::arange(2 * block + 1, torch::kFloat);
  RankFiles files(folder.path().string(), 0, 1, {piece_of("weights/w", values, 0, values.numel())});
  files.write(0, values);
  const Index index = files.finish();
  const Piece& piece = index.files.begin()->second.pieces.at(0);
  EXPECT_EQ(piece.checksums, block_checksums(values.const_data_ptr(), values.nbytes()));
  EXPECT_EQ(piece.checksums.size(), 3U);
}

TEST(RankFiles, NothingIsThereBeforeItIsFinished) {
  const test::ScratchFolder folder;
  const at::Tensor values = torch::ones({4});
  {
    RankFiles files(folder.path().string(), 0, 1, {piece_of("weights/w", values, 0, 4)});
    files.write(0, values);
    EXPECT_FALSE(std::filesystem::exists(folder / "weights-00000-of-00001.safetensors"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(RankFiles, WhatIsWrittenIsWhatWasPlanned) {
  const test::ScratchFolder folder;
  const at::Tensor values = torch::ones({4, 2});
  RankFiles files(folder.path().string(), 0, 1,
                  {piece_of("weights/w", values, 0, 8), piece_of("weights/v", values, 2, 3)});
  EXPECT_THAT([&] { files.write(0, torch::ones({7})); }, ThrowsMessage<UsageError>(HasSubstr("weights/w")));
  EXPECT_THAT([&] { files.write(0, torch::ones({2, 4}).t()); }, ThrowsMessage<UsageError>(HasSubstr("weights/w")));
  EXPECT_THROW(files.write(0, torch::ones({4}, torch::kHalf)), UsageError);
  EXPECT_ANY_THROW(files.write(2, values));
  files.write(0, values);
  EXPECT_THROW(files.write(0, values), UsageError);
  EXPECT_THAT([&] { files.finish(); }, ThrowsMessage<UsageError>(HasSubstr("\"v@2\" was not written")));
}

TEST(RankFiles, AFolderThatIsMissing) {
  const at::Tensor values = torch::ones({4});
  EXPECT_THAT([&] { RankFiles("/no/such/folder", 0, 1, {piece_of("weights/w", values, 0, 4)}); },
              ThrowsMessage<IoError>(HasSubstr("/no/such/folder")));
}

}  // namespace
}  // namespace ds::checkpoint
