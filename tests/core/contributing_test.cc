// What the pages for contributors and users point to is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <regex>
#include <string>
#include <vector>

#include "tests/core/page.h"

namespace ds::contributing {
namespace {

namespace fs = std::filesystem;

const fs::path kTree = DS_SOURCE_DIR;

std::vector<std::string> matches(const std::string& text, const std::regex& pattern) {
  std::vector<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) found.push_back((*it)[1]);
  return found;
}

// "optim/NAME.cc": a file that the reader is to make; "build/...": one that the build or the setup makes.
bool is_meant_to_be_there(const std::string& path) {
  static const std::regex kToBeNamed("NAME(\\.[a-z]+)?|PRESET");
  if (path.starts_with("build/") || path.starts_with(".deps/")) return false;
  for (const fs::path& part : fs::path(path)) {
    if (std::regex_match(part.string(), kToBeNamed)) return false;
  }
  return true;
}

// Words in backticks with a slash in them: `folder/file.cc`, or `folder/file` for file.h and file.cc.
std::vector<std::string> named_paths(const std::string& page) {
  static const std::regex kPath("`([A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)+/?)`");
  std::vector<std::string> paths = matches(read_page(page), kPath);
  std::erase_if(paths, [](const std::string& path) { return !is_meant_to_be_there(path); });
  return paths;
}

bool is_there(const std::string& path) {
  return fs::exists(kTree / path) || fs::exists(kTree / (path + ".h")) || fs::exists(kTree / (path + ".cc"));
}

TEST(Contributing, EveryFileThatIsNamedExists) {
  for (const char* page :
       {"CONTRIBUTING.md", "docs/coverage.md", "docs/design.md", "docs/dependencies.md", "docs/process.md"}) {
    const std::vector<std::string> paths = named_paths(page);
    EXPECT_GE(paths.size(), 2U) << page << ": the test must see the page";
    for (const std::string& path : paths) EXPECT_TRUE(is_there(path)) << page << " names " << path;
  }
}

TEST(Contributing, EveryLinkOfAPageLeadsToAFile) {
  static const std::regex kLink("\\]\\(([^)#: ]+)(?:#[^) ]*)?\\)");  // no lambda's [](int64_t step)
  std::vector<fs::path> pages;
  for (const char* folder : {"", "docs", "docs/api", "configs", "examples"}) {
    for (const auto& entry : fs::directory_iterator(kTree / folder)) {
      if (entry.path().extension() == ".md") pages.push_back(fs::relative(entry.path(), kTree));
    }
  }
  EXPECT_GT(pages.size(), 10U) << "the test must see the pages";
  for (const fs::path& page : pages) {
    for (const std::string& link : matches(read_page(page.string()), kLink)) {
      EXPECT_TRUE(fs::exists(kTree / page.parent_path() / link)) << page.string() << " links to " << link;
    }
  }
}

TEST(Contributing, TheIndexOfTheDocsNamesEveryPage) {
  const std::string index = read_page("docs/README.md");
  for (const auto& entry : fs::directory_iterator(kTree / "docs")) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() != ".md" || name == "README.md") continue;
    EXPECT_NE(index.find("](" + name + ")"), std::string::npos) << "docs/README.md does not name " << name;
  }
}

}  // namespace
}  // namespace ds::contributing
