// ds-tool check of files that show where its verdict may differ from DeepSpeed's: tests/tools/config_verdicts, which
// scripts/config_verdicts reads too, and docs/config_verdicts.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/tools/command_outcome.h"
#include "tools/check_command.h"

namespace ds::tool {
namespace {

using ::testing::HasSubstr;

const std::filesystem::path kVerdicts = std::filesystem::path(DS_SOURCE_DIR) / "tests/tools/config_verdicts";

nlohmann::json expected_verdicts() {
  std::ifstream file(kVerdicts / "expected.json");
  return nlohmann::json::parse(file).at("verdicts");
}

TEST(ConfigVerdicts, AreThoseThatTheTableSays) {
  for (const nlohmann::json& entry : expected_verdicts()) {
    const std::string name = entry.at("file");
    SCOPED_TRACE(name);
    const Outcome outcome = outcome_of([&](auto& out, auto& err) {
      return check({.config = (kVerdicts / name).string(), .world_size = entry.value("world_size", 1)}, out, err);
    });
    EXPECT_EQ(outcome.code == 0 ? "accepted" : "refused", entry.at("here")) << outcome.err;
    EXPECT_THAT(outcome.out + outcome.err, HasSubstr(entry.value("says", "")));
  }
}

// A difference has a reason, and an agreement needs none.
TEST(ConfigVerdicts, ThatDifferFromDeepSpeedsHaveAReason) {
  std::set<std::string> named;
  for (const nlohmann::json& entry : expected_verdicts()) {
    EXPECT_EQ(entry.at("here") != entry.at("deepspeed"), entry.contains("why")) << entry;
    named.insert(entry.at("file"));
  }
  for (const auto& file : std::filesystem::directory_iterator(kVerdicts)) {
    const std::string name = file.path().filename().string();
    EXPECT_TRUE(name == "expected.json" || named.contains(name)) << name;
  }
}

}  // namespace
}  // namespace ds::tool
