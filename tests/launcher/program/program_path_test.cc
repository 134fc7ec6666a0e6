#include "launcher/program/program_path.h"

#include <gmock/gmock.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace ds::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ProgramPath : public ::testing::Test {
 protected:
  ProgramPath() {
    std::string folder = ::testing::TempDir() + "ds_path_XXXXXX";
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    make("train", true);
    make("notes.txt", false);
    make("script.py", false);
  }
  ~ProgramPath() override { std::filesystem::remove_all(folder_); }
  void make(const std::string& name, bool executable) {
    std::ofstream(folder_ + "/" + name) << "#!/bin/sh\n";
    std::filesystem::permissions(folder_ + "/" + name,
                                 executable ? std::filesystem::perms(0755) : std::filesystem::perms(0644));
  }
  static ProgramError error_of(const std::string& program, const std::string& path) {
    try {
      find_program(program, path);
    } catch (const ProgramError& error) {
      return error;
    }
    return {0, "no error"};
  }
  std::string folder_;
};

TEST_F(ProgramPath, LooksInPathOnlyForANameWithoutASlash) {
  EXPECT_EQ(find_program("train", "/nonexistent:" + folder_), folder_ + "/train");
  EXPECT_EQ(find_program(folder_ + "/train", ""), folder_ + "/train");
  EXPECT_EQ(error_of("train", "/nonexistent").exit_code(), 127);
  EXPECT_THAT(error_of("train", "/nonexistent").what(), HasSubstr("'train' was not found in PATH"));
  EXPECT_EQ(error_of("", folder_).exit_code(), 127);
}

TEST_F(ProgramPath, SaysWhatIsWrongWithAFile) {
  const ProgramError missing = error_of(folder_ + "/tarin", "");
  EXPECT_EQ(missing.exit_code(), 127);
  EXPECT_THAT(missing.what(), AllOf(HasSubstr("/tarin'"), HasSubstr("No such file")));
  const ProgramError text = error_of(folder_ + "/notes.txt", "");
  EXPECT_EQ(text.exit_code(), 126);
  EXPECT_THAT(text.what(), AllOf(HasSubstr("not executable"), HasSubstr("chmod +x")));
  const ProgramError folder = error_of(folder_, "");
  EXPECT_EQ(folder.exit_code(), 126);
  EXPECT_THAT(folder.what(), HasSubstr("is a folder"));
}

TEST_F(ProgramPath, HasAHintForPythonScripts) {
  const ProgramError script = error_of(folder_ + "/script.py", "");
  EXPECT_EQ(script.exit_code(), 126);
  EXPECT_THAT(script.what(),
              AllOf(HasSubstr("ds-launch runs programs"), HasSubstr("python3 " + folder_ + "/script.py")));
  const ProgramError bare = error_of("script.py", "/nonexistent");
  EXPECT_EQ(bare.exit_code(), 127);
  EXPECT_THAT(bare.what(), HasSubstr("python3 script.py"));
}

TEST(ExecError, SaysWhyTheKernelRefused) {
  EXPECT_EQ(exec_error("x", ENOEXEC).exit_code(), 126);
  EXPECT_THAT(exec_error("x", ENOEXEC).what(), HasSubstr("not a binary for this machine"));
  EXPECT_THAT(exec_error("x", ENOENT).what(), HasSubstr("interpreter"));
  EXPECT_THAT(exec_error("x", EPERM).what(), HasSubstr("not permitted"));
}

}  // namespace
}  // namespace ds::launcher
