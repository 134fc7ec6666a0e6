// ds-tool report as people run it.
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/scratch_folder.h"
#include "tools/report/child_process.h"

namespace ds::tool {
namespace {

using report::Finished;
using report::run_child;
using ::testing::HasSubstr;

constexpr auto kLimit = std::chrono::seconds(100);

TEST(Report, HasEverySectionInJson) {
  const Finished run = run_child({"/usr/bin/env", "DS_LOG_LEVEL=info", DS_TOOL, "report", "--json"}, kLimit);
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  const auto json = nlohmann::json::parse(run.out);
  for (const char* name :
       {"host", "versions", "devices", "cpu", "backends", "network", "limits", "environment", "warnings"}) {
    EXPECT_TRUE(json.contains(name)) << name;
  }
  EXPECT_TRUE(json["versions"]["libtorch"].is_object()) << json["versions"]["libtorch"];
  EXPECT_EQ(json["backends"]["gloo"]["works"], true) << json["backends"];
  EXPECT_EQ(json["backends"]["shm"]["works"], true) << json["backends"];
  EXPECT_TRUE(json["backends"]["nccl"].contains("works"));
  EXPECT_FALSE(json["cpu"]["vector_kernels"]["chosen"].get<std::string>().empty());
  EXPECT_FALSE(json["network"]["interfaces"].empty());
  EXPECT_EQ(json["environment"]["variables"]["DS_LOG_LEVEL"], "info");
}

TEST(Report, PrintsTheSameAsText) {
  const Finished run = run_child({DS_TOOL, "report"}, kLimit);
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  for (const char* title :
       {"versions\n", "devices\n", "cpu\n", "backends\n", "network\n", "limits\n", "environment\n", "warnings\n"}) {
    EXPECT_THAT(run.out, HasSubstr(title));
  }
}

// Without LibTorch, or with a broken one: a copy of ds-tool that has nothing beside it.
TEST(Report, SurvivesWhatItAsks) {
  const test::ScratchFolder folder;
  std::filesystem::copy_file(DS_TOOL, folder.path() / "ds-tool");
  const Finished run = run_child({folder / "ds-tool", "report", "--json"}, kLimit);
  ASSERT_TRUE(run.fine) << run.ending << "\n" << run.err;
  const auto json = nlohmann::json::parse(run.out);
  EXPECT_TRUE(json["versions"]["libtorch"].is_null());
  EXPECT_THAT(json["warnings"][0].get<std::string>(), HasSubstr("LibTorch cannot be asked"));
}

}  // namespace
}  // namespace ds::tool
