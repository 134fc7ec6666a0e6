// A file in a folder where everybody may write.
#include "launcher/command_line/pid_file.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/check.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"

namespace ds::launcher {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(PidFile, IsTheUsersAlone) {
  const test::ScratchFolder folder;
  const std::string path = folder / "pid";
  {
    const PidFile file(path);
    EXPECT_EQ(fs::status(path).permissions(), fs::perms::owner_read | fs::perms::owner_write);
    EXPECT_EQ(test::file_text(path), cat(getpid(), '\n'));
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST(PidFile, WritesThroughNoLink) {
  const test::ScratchFolder folder;
  const std::string victim = folder.write("victim", "kept");
  fs::create_symlink(victim, folder / "pid");
  EXPECT_THAT([&] { PidFile(folder / "pid"); }, ThrowsMessage<IoError>(HasSubstr("--save_pid")));
  fs::remove(folder / "pid");
  fs::create_symlink(folder / "absent", folder / "pid");
  EXPECT_THAT([&] { PidFile(folder / "pid"); }, ThrowsMessage<IoError>(HasSubstr("--save_pid")));
  EXPECT_EQ(test::file_text(victim), "kept");
  EXPECT_FALSE(fs::exists(folder / "absent"));
}

}  // namespace
}  // namespace ds::launcher
