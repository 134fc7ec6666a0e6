#include "core/files/regular_file.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/scratch_folder.h"

namespace ds {
namespace {

using ::testing::HasSubstr;

TEST(RegularFile, IsReadWhole) {
  const test::ScratchFolder folder;
  const std::string text(100'000, 'x');
  const FileText file = read_regular_file(folder.write("text", text), text.size());
  EXPECT_EQ(file.trouble, "");
  EXPECT_EQ(file.text, text);
  EXPECT_EQ(read_regular_file(folder.write("none", ""), 10).trouble, "");
}

TEST(RegularFile, IsNotTooLong) {
  const test::ScratchFolder folder;
  const FileText file = read_regular_file(folder.write("text", std::string(11, 'x')), 10);
  EXPECT_EQ(file.trouble, "expected at most 10 bytes, found 11 bytes");
  EXPECT_EQ(file.text, "");
}

// A fifo without a writer, and what never ends: an answer at once.
TEST(RegularFile, IsNothingElse) {
  const test::ScratchFolder folder;
  const std::string fifo = folder.write("fifo", "");
  ASSERT_EQ(unlink(fifo.c_str()), 0);
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(read_regular_file(fifo, 1 << 20).trouble, HasSubstr("found a pipe"));
  EXPECT_THAT(read_regular_file("/dev/zero", 1 << 20).trouble, HasSubstr("found a device"));
  EXPECT_THAT(read_regular_file("/tmp", 1 << 20).trouble, HasSubstr("found a folder"));
  EXPECT_THAT(read_regular_file("/no/such/file", 1 << 20).trouble, HasSubstr("No such file"));
}

}  // namespace
}  // namespace ds
