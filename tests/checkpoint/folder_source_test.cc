// Reading a checkpoint folder: any part, in any dtype, from the files of any number of ranks; and never anything else
// than what was written.
#include "checkpoint/folder_source.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/block_checksum.h"
#include "checkpoint/export.h"
#include "checkpoint/index.h"
#include "core/check.h"
#include "tests/checkpoint/source/memory_source.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"

namespace ds::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

at::Tensor numbers(std::vector<int64_t> sizes, at::ScalarType dtype, double first = 0.25) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return (torch::arange(count, torch::kDouble) * 0.5 + first).to(dtype).view(sizes);
}

struct SmallSource : MemorySource {
  SmallSource() {
    add("weights/a", numbers({3, 7}, at::kFloat));
    add("weights/b", numbers({5}, at::kBFloat16), /*frozen=*/true);
    add("weights/scalar", numbers({}, at::kDouble, 1e-40));
    add("weights/none", torch::empty({0, 3}));
    add("buffers/count", torch::tensor(-(int64_t{1} << 62), torch::kLong));
    add("buffers/mask", torch::tensor({1, 0, 1}).to(torch::kBool));
    add("optimizer/exp_avg/a", numbers({3, 7}, at::kFloat, 100));
    add("ranks/0/rng.cpu", numbers({9}, at::kByte));
    add_alias("head", "a");
    mutable_state().global_steps = 3;
    mutable_state().precision = "float32";
  }
};

// Every value, bit for bit.
void expect_same(Source& found, Source& wanted) {
  EXPECT_EQ(found.tensors(), wanted.tensors());
  EXPECT_EQ(found.aliases(), wanted.aliases());
  EXPECT_EQ(to_json(found.state()), to_json(wanted.state()));
  for (const auto& [path, info] : wanted.tensors()) {
    EXPECT_TRUE(torch::equal(found.tensor(path), wanted.tensor(path))) << path;
  }
}

void write_file(const fs::path& file, const std::string& content) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << content;
}

// --- parts -----------------------------------------------------------------------------------------------------------

// Cut where nothing is aligned, larger than a block of checksums.
TEST(FolderSource, AnyPartInAnyDtype) {
  const test::ScratchFolder folder;
  const int64_t numel = 2 * static_cast<int64_t>(kChecksumBlock / sizeof(float)) + 12345;
  MemorySource source;
  source.add("weights/large", torch::arange(numel, torch::kInt).to(torch::kFloat).sin());
  source.add("weights/half", torch::arange(1001, torch::kFloat).cos().to(torch::kHalf));
  rewrite(source, folder / "tag", 5);
  EXPECT_TRUE(verify(folder / "tag").empty());
  const auto found = open_folder(folder / "tag");
  expect_same(*found, source);
  const int64_t block = kChecksumBlock / sizeof(float);
  for (const std::string path : {"weights/large", "weights/half"}) {
    const at::Tensor whole = source.tensor(path).view({-1});
    for (const auto& [wanted_offset, wanted_length] :
         std::vector<std::pair<int64_t, int64_t>>{{0, 1},
                                                  {numel - 1, 1},
                                                  {block - 1, 2},
                                                  {block, block},
                                                  {1, numel - 2},
                                                  {numel / 5 - 1, 3},
                                                  {numel / 5 * 2, numel / 5 + 7},
                                                  {777, 0},
                                                  {numel, 0},
                                                  {199, 603}}) {
      const int64_t offset = std::min(wanted_offset, whole.numel());
      const int64_t length = std::min(wanted_length, whole.numel() - offset);
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        // A part of something larger, whose neighbours must stay.
        const at::Tensor around = torch::full({length + 2}, -7, dtype);
        found->read(path, offset, around.narrow(0, 1, length));
        EXPECT_TRUE(torch::equal(around.narrow(0, 1, length), whole.narrow(0, offset, length).to(dtype)))
            << path << " " << offset << " " << length << " " << dtype;
        EXPECT_EQ(around[0].item<double>(), -7);
        EXPECT_EQ(around[length + 1].item<double>(), -7);
      }
    }
  }
}

TEST(FolderSource, AnyNumberOfRanksWritesTheSame) {
  const test::ScratchFolder folder;
  SmallSource source;
  for (const int ranks : {1, 2, 3, 7, 40}) {
    rewrite(source, folder / cat("ranks", ranks), ranks);
    EXPECT_TRUE(verify(folder / cat("ranks", ranks)).empty()) << ranks;
    expect_same(*open_folder(folder / cat("ranks", ranks)), source);
  }
}

TEST(FolderSource, MisuseIsAnError) {
  const test::ScratchFolder folder;
  SmallSource source;
  rewrite(source, folder / "tag");
  const auto found = open_folder(folder / "tag");
  EXPECT_ANY_THROW(found->read("weights/a", 20, torch::empty({2})));
  EXPECT_ANY_THROW(found->read("weights/a", -1, torch::empty({2})));
  EXPECT_ANY_THROW(found->read("weights/a", 0, torch::empty({4, 4}).t().narrow(0, 0, 2)));
  EXPECT_THAT([&] { found->read("weights/x", 0, torch::empty({1})); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("weights/x"), HasSubstr(folder / "tag"))));
}

// A checkpoint of many ranks has more files than a process may have open.
TEST(FolderSource, MoreFilesThanMayBeOpen) {
  const test::ScratchFolder folder;
  MemorySource source;
  source.add("weights/a", numbers({300}, at::kFloat));
  source.add("optimizer/exp_avg/a", numbers({300}, at::kFloat));
  rewrite(source, folder / "tag", 60);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto open_now = std::distance(fs::directory_iterator("/proc/self/fd"), {});
  const rlimit few{.rlim_cur = static_cast<rlim_t>(open_now) + 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  try {
    expect_same(*open_folder(folder / "tag"), source);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

// --- damage ----------------------------------------------------------------------------------------------------------

class FolderDamage : public testing::Test {
 protected:
  FolderDamage() : tag_(folder_.path() / "tag") { rewrite(source_, tag_.string(), 2); }

  std::vector<fs::path> files() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(tag_)) all.push_back(entry.path());
    std::sort(all.begin(), all.end());
    return all;
  }
  // Either an error names the file, or what is read is what was written.
  void expect_found_or_harmless(const fs::path& file, const std::string& how) {
    bool opened_whole = false;
    try {
      expect_same(*open_folder(tag_.string()), source_);
      opened_whole = true;
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(file.filename().string())) << how;
    }
    std::vector<Damage> damages = verify(tag_.string());
    EXPECT_EQ(damages.empty(), opened_whole) << how;
    for (const Damage& damage : damages) EXPECT_EQ(damage.file, file.filename().string()) << how;
    // Layout of JSON between tokens; nothing else.
    if (opened_whole) {
      EXPECT_EQ(file.filename(), kIndexName) << how;
      ++harmless_;
    }
  }

  test::ScratchFolder folder_;
  SmallSource source_;
  fs::path tag_;
  int harmless_ = 0;
};

TEST_F(FolderDamage, EveryByteOfEveryFile) {
  EXPECT_EQ(files().size(), 7U);  // index; weights, optimizer and ranks of two
  for (const fs::path& file : files()) {
    const std::string whole = test::file_text(file);
    for (size_t at = 0; at < whole.size(); ++at) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      write_file(file, damaged);
      expect_found_or_harmless(file, cat(file.string(), ": byte ", at, " of ", whole.size()));
      if (HasFailure()) return;
    }
    write_file(file, whole);
  }
  EXPECT_LE(harmless_, 2);
  expect_same(*open_folder(tag_.string()), source_);
}

TEST_F(FolderDamage, EveryLengthOfEveryFile) {
  for (const fs::path& file : files()) {
    const std::string whole = test::file_text(file);
    for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
      write_file(file, whole.substr(0, bytes));
      expect_found_or_harmless(file, cat(file.string(), ": ", bytes, " of ", whole.size(), " bytes"));
      if (HasFailure()) return;
    }
    write_file(file, whole + '\0');
    expect_found_or_harmless(file, cat(file.string(), ": one byte more"));
    write_file(file, whole);
  }
  EXPECT_LE(harmless_, 2);  // the end of the last line, and what comes after it
}

TEST_F(FolderDamage, AFileIsMissing) {
  for (const fs::path& file : files()) {
    const fs::path away = folder_.path() / "away";
    fs::rename(file, away);
    EXPECT_THAT([&] { open_folder(tag_.string()); }, ThrowsMessage<IoError>(HasSubstr(file.filename().string())));
    const std::vector<Damage> damages = verify(tag_.string());
    ASSERT_EQ(damages.size(), 1U) << file;
    EXPECT_EQ(damages[0].file, file.filename().string());
    fs::create_directory(file);  // nor is a folder one
    EXPECT_THROW(expect_same(*open_folder(tag_.string()), source_), IoError);
    EXPECT_FALSE(verify(tag_.string()).empty());
    fs::remove(file);
    fs::rename(away, file);
  }
}

// A rank reads few of many ranks' files: the others are not opened.
TEST_F(FolderDamage, WhatIsNotReadIsNotOpened) {
  const fs::path second = tag_ / "weights-00001-of-00002.safetensors";
  const std::string whole = test::file_text(second);
  write_file(second, std::string(whole.size(), '\0'));
  const auto found = open_folder(tag_.string());
  const at::Tensor first = torch::empty({2});
  found->read("weights/a", 0, first);
  EXPECT_TRUE(torch::equal(first, source_.tensor("weights/a").view({-1}).narrow(0, 0, 2)));
  EXPECT_THAT([&] { found->tensor("weights/a"); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("weights-00001"), HasSubstr("its first"))));
  write_file(second, whole);
  EXPECT_TRUE(torch::equal(found->tensor("weights/a"), source_.tensor("weights/a")));
}

// A file of the same size, from another checkpoint of the same model.
TEST_F(FolderDamage, AFileOfAnotherCheckpoint) {
  SmallSource other;
  other.add("weights/a", numbers({3, 7}, at::kFloat, 9));
  const fs::path second = folder_.path() / "second";
  rewrite(other, second.string(), 2);
  const std::string name = "weights-00000-of-00002.safetensors";
  ASSERT_EQ(fs::file_size(second / name), fs::file_size(tag_ / name));
  fs::copy_file(second / name, tag_ / name, fs::copy_options::overwrite_existing);
  EXPECT_THAT([&] { open_folder(tag_.string())->tensor("weights/a"); },
              ThrowsMessage<IoError>(AllOf(HasSubstr("weights/a"), HasSubstr(name), HasSubstr("damaged"))));
  const std::vector<Damage> damages = verify(tag_.string());
  ASSERT_EQ(damages.size(), 1U);
  EXPECT_EQ(damages[0].tensor, "weights/a");
}

// What changes after it was opened.
TEST_F(FolderDamage, AFileThatIsCutWhileItIsRead) {
  const auto found = open_folder(tag_.string());
  fs::resize_file(tag_ / "weights-00001-of-00002.safetensors",
                  fs::file_size(tag_ / "weights-00001-of-00002.safetensors") - 1);
  EXPECT_THAT([&] { expect_same(*found, source_); }, ThrowsMessage<IoError>(HasSubstr("weights-00001")));
}

TEST_F(FolderDamage, AllDamagedBlocksAreListed) {
  MemorySource large;
  const int64_t block = kChecksumBlock / sizeof(float);
  large.add("weights/large", torch::arange(3 * block, torch::kInt).to(torch::kFloat));
  large.add("weights/small", torch::ones({8}));
  const fs::path tag = folder_.path() / "large";
  rewrite(large, tag.string());
  const fs::path file = tag / "weights-00000-of-00001.safetensors";
  const auto found = open_folder(tag.string());
  std::string bytes = test::file_text(file);
  bytes[bytes.size() - 40] ^= 1;                       // large, last block
  bytes[bytes.size() - 40 - 2 * kChecksumBlock] ^= 1;  // first block
  write_file(file, bytes);
  const std::vector<Damage> damages = verify(tag.string());
  ASSERT_EQ(damages.size(), 2U);
  EXPECT_EQ(damages[0].tensor, "weights/large");
  EXPECT_EQ(damages[1].tensor, "weights/large");
  // The block between them, and other tensors, can still be read.
  const at::Tensor middle = torch::empty({block});
  found->read("weights/large", block, middle);
  EXPECT_TRUE(torch::equal(middle, torch::arange(block, 2 * block, torch::kInt).to(torch::kFloat)));
  EXPECT_TRUE(torch::equal(found->tensor("weights/small"), torch::ones({8})));
  EXPECT_THROW(found->tensor("weights/large"), IoError);
}

// Not even one of the right content.
TEST(FolderSource, AFileThatIsALinkToAnotherFolderIsRefused) {
  const test::ScratchFolder folder;
  SmallSource source;
  rewrite(source, folder / "tag", 1);
  fs::path file;
  for (const auto& entry : fs::directory_iterator(folder / "tag")) {
    if (entry.path().filename().string().starts_with("weights-")) file = entry.path();
  }
  const fs::path elsewhere = folder / "elsewhere";
  fs::rename(file, elsewhere);
  fs::create_symlink(elsewhere, file);
  EXPECT_THAT([&] { open_folder(folder / "tag"); },
              ThrowsMessage<IoError>(AllOf(HasSubstr(file.filename().string()), HasSubstr("is a link to"))));
  ASSERT_EQ(verify(folder / "tag").size(), 1U);
  fs::rename(elsewhere, fs::path(folder / "tag") / "moved");
  fs::remove(file);
  fs::create_symlink("moved", file);
  EXPECT_NO_THROW(open_folder(folder / "tag"));
}

// A file without blocks on the disk may claim any size.
TEST(FolderSource, AnIndexOfEndlessSizeIsRefusedUnread) {
  const test::ScratchFolder folder;
  SmallSource source;
  rewrite(source, folder / "tag", 1);
  fs::resize_file(folder / "tag/index.json", uint64_t{1} << 40);
  EXPECT_THAT([&] { open_folder(folder / "tag"); },
              ThrowsMessage<IoError>(HasSubstr("expected at most 1073741824 bytes")));
}

}  // namespace
}  // namespace ds::checkpoint
