// Tensors that were written in parts: read whole, in slices, and in parts of any other cut, with any degree; damage and
// misuse are errors.
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/export.h"
#include "checkpoint/folder_source.h"
#include "checkpoint/index.h"
#include "checkpoint/source/part_reader.h"
#include "core/check.h"
#include "core/files/safetensors.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/checkpoint/split_folder.h"
#include "tests/core/random_cut.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

at::Tensor numbers(const std::vector<int64_t>& sizes, at::ScalarType dtype, int64_t first = 1) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return (torch::arange(count, torch::kDouble) + static_cast<double>(first)).to(dtype).view(sizes);
}

class Property {
 public:
  explicit Property(unsigned seed) : random_(seed) {}
  int64_t from(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }

  // Writes with random cuts and reads with others.
  void run() {
    const test::ScratchFolder folder;
    std::vector<SplitTensor> tensors;
    const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kBFloat16, at::kLong, at::kByte};
    for (int i = 0; i < 12; ++i) {
      const test::RandomCut cut = test::random_cut(random_);
      tensors.push_back({.path = cat("weights/", i),
                         .values = numbers(cut.sizes, dtypes[i % dtypes.size()], from(0, 100)),
                         .cut = cut.cut,
                         .count = from(0, 5) == 0 ? 0 : cut.count});
    }
    write_split_folder(tensors, folder / "tag", static_cast<int>(from(1, 4)), static_cast<int>(from(1, 3)));
    ASSERT_TRUE(verify(folder / "tag").empty());
    const auto source = open_folder(folder / "tag");
    MemorySource memory;
    for (const SplitTensor& tensor : tensors) memory.add(tensor.path, tensor.values);
    for (const SplitTensor& tensor : tensors) {
      ASSERT_TRUE(torch::equal(source->tensor(tensor.path), tensor.values)) << tensor.path;
      for (int trial = 0; trial < 6; ++trial) {
        read_slice(*source, tensor);
        read_random_part(*source, tensor);
        read_random_part(memory, tensor);
      }
      if (tensor.count > 0) {  // the same cut
        read_one_part(
            *source, tensor,
            {tensor.values.sizes().vec(), tensor.cut, static_cast<int>(from(0, tensor.count - 1)), tensor.count});
      }
    }
  }

 private:
  // Into the middle of something, whose neighbours stay.
  template <class Read>
  void expect_read(const at::Tensor& wanted, const Read& read) {
    const at::Tensor around = torch::full({wanted.numel() + 2}, 77, wanted.options());
    read(around.narrow(0, 1, wanted.numel()));
    ASSERT_TRUE(torch::equal(around.narrow(0, 1, wanted.numel()), wanted)) << wanted << around;
    ASSERT_EQ(around[0].item<double>(), 77);
    ASSERT_EQ(around[around.numel() - 1].item<double>(), 77);
  }

  void read_slice(Source& source, const SplitTensor& tensor) {
    const int64_t begin = from(0, tensor.values.numel());
    const int64_t length = from(0, tensor.values.numel() - begin);
    const at::ScalarType dtype = from(0, 1) == 0 ? at::kDouble : tensor.values.scalar_type();
    expect_read(tensor.values.reshape({-1}).narrow(0, begin, length).to(dtype),
                [&](const at::Tensor& to) { source.read(tensor.path, begin, to); });
  }

  void read_random_part(Source& source, const SplitTensor& tensor) {
    const test::RandomCut cut = test::random_cut_of(tensor.values.sizes().vec(), random_);
    read_one_part(source, tensor, {cut.sizes, cut.cut, static_cast<int>(from(0, cut.count - 1)), cut.count});
  }

  void read_one_part(Source& source, const SplitTensor& tensor, const TensorPart& part) {
    const int64_t begin = from(0, part.numel());
    const int64_t length = from(0, part.numel() - begin);
    expect_read(part_values(tensor.values, part).reshape({-1}).narrow(0, begin, length),
                [&](const at::Tensor& to) { read_part(source, tensor.path, part, begin, to); });
  }

  std::mt19937 random_;
};

TEST(SplitTensors, AnyCutIsReadInAnyOther) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    Property(seed).run();
    if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

// Parts of several blocks of checksums.
TEST(SplitTensors, MoreThanABlock) {
  const test::ScratchFolder folder;
  const at::Tensor rows = torch::arange(1100 * 1001, torch::kInt).to(torch::kFloat).sin().view({1100, 1001});
  write_split_folder({{"weights/rows", rows, {.dim = 0}, 3}, {"weights/columns", rows, {.dim = 1}, 3}}, folder / "tag",
                     3, 2);
  const auto source = open_folder(folder / "tag");
  for (const std::string path : {"weights/rows", "weights/columns"}) {
    EXPECT_TRUE(torch::equal(source->tensor(path), rows)) << path;
    for (const int64_t dim : {0, 1}) {
      for (const int count : {2, 3}) {
        const TensorPart part({1100, 1001}, {.dim = dim}, 1, count);
        const at::Tensor found = torch::empty(part.sizes());
        read_part(*source, path, part, 0, found);
        EXPECT_TRUE(torch::equal(found, part_values(rows, part))) << path << dim << count;
      }
    }
  }
  EXPECT_TRUE(torch::equal(at::cat({source->tensor("weights/columns").narrow(1, 0, 334)}), rows.narrow(1, 0, 334)));
}

// Query, key and value fused, with fewer heads of the latter two; heads that do not divide.
TEST(SplitTensors, FusedBlocks) {
  const test::ScratchFolder folder;
  const at::Tensor weight = numbers({7 * 4 + 2 * 4 + 2 * 4, 5}, at::kFloat);
  const Cut cut{.dim = 0, .blocks = {28, 8, 8}, .grain = 4};
  write_split_folder({{"weights/qkv", weight, cut, 2}}, folder / "tag", 2, 1);
  const SafetensorsFile file(folder / "tag/weights-00001-of-00002.safetensors");
  const at::Tensor second = file.tensor("qkv@part-1-of-2");
  EXPECT_TRUE(
      torch::equal(second, torch::cat({weight.narrow(0, 16, 12), weight.narrow(0, 32, 4), weight.narrow(0, 40, 4)})));
  EXPECT_TRUE(torch::equal(open_folder(folder / "tag")->tensor("weights/qkv"), weight));
}

// What works on sources works on it: other checkpoints, and weights for other programs.
TEST(SplitTensors, AreRewrittenAndExported) {
  const test::ScratchFolder folder;
  const at::Tensor weight = numbers({51, 3}, at::kFloat);
  write_split_folder({{"weights/wte.weight", weight, {.dim = 0}, 4}, {"weights/ln.weight", numbers({3}, at::kFloat)}},
                     folder / "tag", 4, 1);
  const auto source = open_folder(folder / "tag");
  rewrite(*source, folder / "again", 3);
  EXPECT_TRUE(torch::equal(open_folder(folder / "again")->tensor("weights/wte.weight"), weight));
  EXPECT_EQ(test::file_text(folder / "again/index.json").find("\"version\":2"), std::string::npos);
  ExportOptions options;
  export_weights(*source, folder / "plain", options);
  EXPECT_TRUE(torch::equal(open_weights(folder / "plain")->tensor("weights/wte.weight"), weight));
}

TEST(SplitTensors, MisuseIsAnError) {
  const test::ScratchFolder folder;
  write_split_folder({{"weights/a", numbers({6, 4}, at::kFloat), {.dim = 1}, 2}}, folder / "tag", 2, 1);
  const auto source = open_folder(folder / "tag");
  const TensorPart part({6, 4}, {.dim = 0}, 0, 3);
  EXPECT_THROW(read_part(*source, "weights/a", part, 0, torch::empty({9})), UsageError);
  EXPECT_THROW(read_part(*source, "weights/a", part, -1, torch::empty({2})), UsageError);
  EXPECT_THROW(read_part(*source, "weights/a", {{4, 6}, {.dim = 0}, 0, 2}, 0, torch::empty({2})), UsageError);
  EXPECT_THROW(read_part(*source, "weights/b", part, 0, torch::empty({2})), IoError);
  const test::ScratchFolder other;
  EXPECT_THROW(RankFiles(other.path().string(), 0, 1,
                         {{"weights/a",
                           {.dtype = at::kFloat, .sizes = {2, 2}},
                           0,
                           4,
                           std::make_shared<TensorPart>(std::vector<int64_t>{4, 2}, Cut{.dim = 0}, 0, 2)}}),
               UsageError);
}

// One rank's file is gone: it is named, not the elements that are missing.
TEST(SplitTensors, AMissingFileIsNamed) {
  const test::ScratchFolder folder;
  write_split_folder({{"weights/a", numbers({6, 4}, at::kFloat), {.dim = 1}, 2}}, folder / "tag", 2, 1);
  fs::remove(folder.path() / "tag/weights-00001-of-00002.safetensors");
  EXPECT_THAT([&] { open_folder(folder / "tag"); }, ThrowsMessage<IoError>(HasSubstr("weights-00001-of-00002")));
}

// Every byte and every length: an error that names the file, or the same values.
TEST(SplitTensors, DamageIsFound) {
  const test::ScratchFolder folder;
  const at::Tensor values = numbers({5, 3}, at::kFloat);
  write_split_folder({{"weights/a", values, {.dim = 0, .grain = 1}, 2}, {"weights/b", values, {.dim = 1}, 2}},
                     folder / "tag", 2, 1);
  int harmless = 0;
  const auto expect_found = [&](const fs::path& file, const std::string& content) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
    try {
      const auto source = open_folder(folder / "tag");
      for (const char* path : {"weights/a", "weights/b"}) ASSERT_TRUE(torch::equal(source->tensor(path), values));
      EXPECT_EQ(file.filename(), kIndexName);
      ++harmless;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(file.filename().string()));
    }
  };
  for (const auto& entry : fs::directory_iterator(folder.path() / "tag")) {
    const std::string whole = test::file_text(entry.path());
    for (size_t at = 0; at < whole.size(); ++at) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      expect_found(entry.path(), damaged);
      expect_found(entry.path(), whole.substr(0, at));
    }
    std::ofstream(entry.path(), std::ios::binary | std::ios::trunc) << whole;
  }
  EXPECT_LE(harmless, 3);  // white space of the index
}

}  // namespace
}  // namespace ds::checkpoint
