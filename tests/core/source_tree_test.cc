// Rules about the source tree itself: folder includes point down only, and no test file is forgotten.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace ds {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = DS_SOURCE_DIR;

// Folder -> level; a folder may include itself and folders of a lower level (docs/design.md, section 4).
const std::map<std::string, int> kLevels = {
    {"core", 0},      {"launcher", 1}, {"comm", 1},        {"optim", 1},    {"zero", 2},      {"offload", 2},
    {"recompute", 2}, {"parallel", 2}, {"compression", 2}, {"pipeline", 2}, {"profiling", 2}, {"checkpoint", 3},
    {"engine", 4},    {"examples", 6}, {"benchmarks", 6},  {"tests", 6},    {"tools", 6},
};

std::string read(const fs::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<fs::path> files_below(const fs::path& folder, const std::set<std::string>& endings) {
  std::vector<fs::path> result;
  if (!fs::exists(folder)) return result;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && endings.contains(entry.path().extension().string())) result.push_back(entry.path());
  }
  return result;
}

std::vector<std::string> quoted_includes(const fs::path& path) {
  static const std::regex kInclude(R"re(^\s*#\s*include\s*"([^"]+)")re", std::regex::multiline);
  const std::string text = read(path);
  std::vector<std::string> result;
  for (std::sregex_iterator it(text.begin(), text.end(), kInclude), end; it != end; ++it) result.push_back((*it)[1]);
  return result;
}

TEST(SourceTree, FolderIncludesPointDownOnly) {
  int checked = 0;
  for (const auto& [folder, level] : kLevels) {
    for (const fs::path& file : files_below(kRoot / folder, {".h", ".cc", ".cu"})) {
      for (const std::string& include : quoted_includes(file)) {
        const std::string target = include.substr(0, include.find('/'));
        const auto found = kLevels.find(target);
        if (found == kLevels.end()) {
          EXPECT_EQ(level, 6) << fs::relative(file, kRoot) << " includes \"" << include
                              << "\"; includes are written from the repository root, as \"core/check.h\"";
          continue;
        }
        ++checked;
        EXPECT_TRUE(target == folder || found->second < level || level == 6)
            << fs::relative(file, kRoot) << " includes \"" << include << "\": folder " << folder << " (level " << level
            << ") may include itself and lower levels only, " << target << " is at level " << found->second;
      }
    }
  }
  EXPECT_GT(checked, 50) << "the test must see the source tree";
}

TEST(SourceTree, TheLauncherIncludesTheTorchFreePartOfCoreOnly) {
  for (const fs::path& file : files_below(kRoot / "launcher", {".h", ".cc"})) {
    for (const std::string& include : quoted_includes(file)) {
      EXPECT_TRUE(include.starts_with("launcher/") || include.starts_with("core/")) << file << " includes " << include;
    }
    EXPECT_EQ(read(file).find("#include <torch/"), std::string::npos) << file;
    EXPECT_EQ(read(file).find("#include <ATen/"), std::string::npos) << file;
  }
}

TEST(SourceTree, EveryTestFileIsRegistered) {
  int files = 0;
  for (const fs::path& file : files_below(kRoot / "tests", {".cc"})) {
    if (!file.stem().string().ends_with("_test")) continue;
    ++files;
    fs::path folder = file.parent_path();
    while (!fs::exists(folder / "CMakeLists.txt")) folder = folder.parent_path();  // rooms have no list of their own
    EXPECT_NE(read(folder / "CMakeLists.txt").find(fs::relative(file, folder).string()), std::string::npos)
        << fs::relative(file, kRoot) << " is not named in " << fs::relative(folder / "CMakeLists.txt", kRoot);
  }
  EXPECT_GT(files, 5) << "the test must see the source tree";
}

TEST(SourceTree, NoFolderForWhatHasNoName) {
  for (const char* name : {"utils", "util", "common", "misc", "helpers"}) {
    for (const auto& [folder, level] : kLevels)
      EXPECT_FALSE(fs::exists(kRoot / folder / name)) << folder << "/" << name;
    EXPECT_FALSE(fs::exists(kRoot / name)) << name;
  }
}

}  // namespace
}  // namespace ds
