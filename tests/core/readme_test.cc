// The README is short, and its program is one that is compiled and run.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/core/page.h"

namespace ds::readme {
namespace {

constexpr size_t kMostLines = 150;
constexpr size_t kMostColumns = 120;

// The first block of C++, with a newline behind each line.
std::string first_program(const std::vector<std::string>& page) {
  std::string program;
  auto line = std::find(page.begin(), page.end(), "```cpp");
  if (line == page.end()) return program;
  for (++line; line != page.end() && !is_fence(*line); ++line) program += *line + "\n";
  return program;
}

TEST(Readme, ItsProgramIsTheFirstExample) {
  const std::string example = read_page("examples/01_first_step/first_step.cc");
  ASSERT_FALSE(example.empty());
  EXPECT_EQ(first_program(lines_of(read_page("README.md"))), example)
      << "copy examples/01_first_step/first_step.cc into the first block of C++ of README.md, or the other way round";
}

TEST(Readme, IsShort) {
  const std::vector<std::string> page = lines_of(read_page("README.md"));
  EXPECT_GT(page.size(), 50U) << "the test must see the page";
  EXPECT_LE(page.size(), kMostLines) << "what is longer belongs into docs";
  for (const std::string& line : page) {
    if (!line.starts_with("|")) EXPECT_LE(line.size(), kMostColumns) << line;
  }
}

}  // namespace
}  // namespace ds::readme
