#include "examples/gpt/text_corpus.h"

#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace gpt {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::string read(TextCorpus& corpus, int64_t offset, int64_t count) {
  std::string text(static_cast<size_t>(count), '\0');
  corpus.read(offset, {reinterpret_cast<uint8_t*>(text.data()), text.size()});
  return text;
}

TEST(TextCorpus, AFileIsItsBytes) {
  const ds::test::ScratchFolder folder;
  TextCorpus corpus = TextCorpus::open(folder.write("text", std::string("ab\0\xff", 4)));
  EXPECT_EQ(corpus.size(), 4);
  EXPECT_EQ(read(corpus, 1, 3), std::string("b\0\xff", 3));
}

TEST(TextCorpus, AFolderIsItsFilesInTheOrderOfTheirPaths) {
  const ds::test::ScratchFolder folder;
  folder.write("b.h", "second ");
  folder.write("a/z.h", "first ");
  folder.write("c/1.h", "third ");
  folder.write("c/2/deep.h", "fourth");
  folder.write("empty.h", "");
  folder.write(".hidden/x.h", "never");
  folder.write("a/.hidden", "never");
  TextCorpus corpus = TextCorpus::open(folder.path());
  EXPECT_EQ(read(corpus, 0, corpus.size()), "first second third fourth");
  EXPECT_EQ(corpus.file_count(), 4);
  // Every range, whatever files it spans.
  const std::string whole = read(corpus, 0, corpus.size());
  for (int64_t begin = 0; begin < corpus.size(); ++begin) {
    for (int64_t count = 1; begin + count <= corpus.size(); ++count) {
      ASSERT_EQ(read(corpus, begin, count), whole.substr(static_cast<size_t>(begin), static_cast<size_t>(count)));
    }
  }
  EXPECT_THROW(read(corpus, corpus.size() - 1, 2), ds::UsageError);
}

TEST(TextCorpus, AFolderIsCutAtTheLimit) {
  const ds::test::ScratchFolder folder;
  folder.write("a", "12345");
  folder.write("b", "67890");
  folder.write("c", "never");
  TextCorpus corpus = TextCorpus::open(folder.path(), 8);
  EXPECT_EQ(read(corpus, 0, corpus.size()), "12345678");
}

TEST(TextCorpus, NothingToReadIsRefused) {
  const ds::test::ScratchFolder folder;
  EXPECT_THAT([&] { TextCorpus::open(folder / "missing"); },
              ThrowsMessage<ds::IoError>(HasSubstr("missing: no such file")));
  EXPECT_THAT([&] { TextCorpus::open(folder.write("empty", "")); },
              ThrowsMessage<ds::IoError>(HasSubstr("an empty file")));
  EXPECT_THAT([] { TextCorpus::open("/dev/null"); },
              ThrowsMessage<ds::IoError>(HasSubstr("expected a file or a folder")));
  std::filesystem::create_directory(folder / "none");
  EXPECT_THAT([&] { TextCorpus::open(folder / "none"); },
              ThrowsMessage<ds::IoError>(HasSubstr("no file with content")));
}

TEST(TextCorpus, AFileCutDuringTheRunIsAnErrorNotACrash) {
  const ds::test::ScratchFolder folder;
  const std::string path = folder.write("text", "0123456789");
  TextCorpus corpus = TextCorpus::open(path);
  std::filesystem::resize_file(path, 3);
  EXPECT_THROW(read(corpus, 0, 5), ds::IoError);
}

TEST(TextCorpus, TheDefaultIsProse) {
  ASSERT_EQ(unsetenv("DS_GPT_DATA"), 0);
  TextCorpus corpus = TextCorpus::open_or_default(std::nullopt);
  EXPECT_THAT(read(corpus, 0, 4000), HasSubstr("In the beginning God created the heaven and the earth."));
  // So that a run without --data has the curves that configs/README.md shows.
  TextCorpus of_the_tests = TextCorpus::open(DS_SOURCE_DIR "/tests/parity/data/kjv_1m.bin");
  ASSERT_EQ(corpus.size(), of_the_tests.size());
  EXPECT_EQ(read(corpus, 0, corpus.size()), read(of_the_tests, 0, corpus.size()));
}

TEST(TextCorpus, TheEnvironmentNamesAnotherDefault) {
  const ds::test::ScratchFolder folder;
  const std::string path = folder.write("text", "hello");
  ASSERT_EQ(setenv("DS_GPT_DATA", path.c_str(), 1), 0);
  EXPECT_EQ(TextCorpus::open_or_default(std::nullopt).path(), path);
  EXPECT_EQ(TextCorpus::open_or_default(folder.write("other", "x")).path(), folder / "other");
  ASSERT_EQ(setenv("DS_GPT_DATA", "/no/such/text", 1), 0);
  EXPECT_THAT([] { TextCorpus::open_or_default(std::nullopt); },
              ThrowsMessage<ds::IoError>(testing::AllOf(HasSubstr("DS_GPT_DATA"), HasSubstr("/no/such/text"))));
  ASSERT_EQ(unsetenv("DS_GPT_DATA"), 0);
}

}  // namespace
}  // namespace gpt
