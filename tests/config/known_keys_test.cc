// The surface is frozen: a key that comes or goes must be meant.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "config/supported.h"
#include "core/text.h"
#include "dsengine/config.h"

namespace ds::engine::config {
namespace {

TEST(KnownKeys, AreThoseOfTheList) {
  const std::filesystem::path list = std::filesystem::path(DS_SOURCE_DIR) / "tests/config/known_keys.txt";
  std::vector<std::string> expected;
  std::ifstream in(list);
  for (std::string line; std::getline(in, line);) expected.push_back(line);
  const std::vector<std::string> found = known_keys();
  if (found == expected) return;

  const std::filesystem::path fresh = std::filesystem::path(::testing::TempDir()) / "known_keys.txt";
  std::ofstream out(fresh);
  for (const std::string& key : found) out << key << '\n';
  std::string difference;
  for (const std::string& key : found) {
    if (std::find(expected.begin(), expected.end(), key) == expected.end()) difference += cat("\n  + ", key);
  }
  for (const std::string& key : expected) {
    if (std::find(found.begin(), found.end(), key) == found.end()) difference += cat("\n  - ", key);
  }
  FAIL() << "The keys of ds_config changed:" << difference << "\nIf that is meant: cp " << fresh.string() << ' '
         << list.string() << ", and tell configs/README.md and CHANGELOG.md";
}

TEST(KnownKeys, AreSortedAndEachOnce) {
  const std::vector<std::string> keys = known_keys();
  EXPECT_TRUE(std::is_sorted(keys.begin(), keys.end()));
  EXPECT_EQ(std::adjacent_find(keys.begin(), keys.end()), keys.end());
}

}  // namespace
}  // namespace ds::engine::config
