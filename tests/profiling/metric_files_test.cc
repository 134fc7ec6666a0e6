// Monitors that write for other programs, by what these read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "profiling/monitor.h"
#include "tests/support/file_text.h"
#include "tests/support/grouped_locale.h"
#include "tests/support/scratch_folder.h"

namespace ds::profiling {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST(JsonLinesMonitor, HasALineForEachStepAndAppends) {
  const test::ScratchFolder folder;
  const test::GroupedLocale locale;
  {
    const auto monitor = make_json_lines_monitor(folder.path().string(), "job");
    monitor->write_events({{"lr", 0.1, 1000}, {"loss", std::nan(""), 1000}, {"lr", 0.05, 2000}, {"time", 3, 2000}});
  }
  make_json_lines_monitor(folder.path().string(), "job")
      ->write_events({{"lr", -std::numeric_limits<double>::infinity(), 3000}});
  std::istringstream text(test::file_text(folder.path() / "job/metrics.jsonl"));
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(lines.size(), 3U);
  for (nlohmann::json& line : lines) {
    EXPECT_GT(line["time"], 1.7e9);
    line.erase("time");
  }
  EXPECT_EQ(lines[0], (nlohmann::json{{"step", 1000}, {"lr", 0.1}, {"loss", "NaN"}}));
  EXPECT_EQ(lines[1], (nlohmann::json{{"step", 2000}, {"lr", 0.05}, {"time_", 3.0}}));
  EXPECT_EQ(lines[2], (nlohmann::json{{"step", 3000}, {"lr", "-Infinity"}}));
}

// prometheus_client.parser and its openmetrics.parser read this text.
TEST(OpenMetricsMonitor, ReplacesTheFileWithTheLastValues) {
  const test::ScratchFolder folder;
  const auto monitor = make_openmetrics_monitor(folder.path().string(), "a \"job\"");
  monitor->write_events({{"Train/Samples/lr", 0.25, 8}, {"x y", 3, 8}});
  monitor->write_events({{"Train/Samples/lr", 0.125, 1600}, {"x/y", std::nan(""), 1600}});
  EXPECT_EQ(test::file_text(folder.path() / "a \"job\".prom"),
            "# TYPE dsengine_samples gauge\n"
            "dsengine_samples{job=\"a \\\"job\\\"\"} 1600\n"
            "# TYPE dsengine_train_samples_lr gauge\n"
            "dsengine_train_samples_lr{job=\"a \\\"job\\\"\",name=\"Train/Samples/lr\"} 0.125\n"
            "# TYPE dsengine_x_y gauge\n"
            "dsengine_x_y{job=\"a \\\"job\\\"\",name=\"x y\"} 3\n"
            "dsengine_x_y{job=\"a \\\"job\\\"\",name=\"x/y\"} NaN\n"
            "# EOF\n");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1) << "no other file stays";
  monitor->write_events({{"samples", 3, 1600}});
  const std::string text = test::file_text(folder.path() / "a \"job\".prom");
  constexpr std::string_view kType = "# TYPE dsengine_samples gauge";
  EXPECT_EQ(text.find(kType), text.rfind(kType))
      << "a metric has one type line, also with a name that the file has itself";
}

// The files of a run, by their path in its folder.
fs::path only_folder(const fs::path& parent) {
  fs::path found;
  for (const auto& entry : fs::directory_iterator(parent)) {
    if (!entry.is_directory()) continue;
    EXPECT_TRUE(found.empty()) << parent << " has several folders";
    found = entry.path();
  }
  return found;
}

// MLflow's FileStore reads this folder: experiment, run, metrics and their steps.
TEST(MlflowMonitor, IsARunInAnExperiment) {
  const test::ScratchFolder folder;
  fs::path run;
  {
    const auto monitor = make_mlflow_monitor(folder.path().string(), "my: job");
    monitor->write_events({{"Train/Samples/lr", 0.25, 8}, {"../out?", 1, 8}});
    monitor->write_events({{"Train/Samples/lr", 0.125, 16}});
    run = only_folder(only_folder(folder.path()));
    EXPECT_THAT(test::file_text(run / "meta.yaml"), AllOf(HasSubstr("status: 1\n"), HasSubstr("end_time: null\n")));
  }
  EXPECT_THAT(test::file_text(run / "meta.yaml"),
              AllOf(HasSubstr("status: 3\n"), HasSubstr("run_id: " + run.filename().string() + "\n")));
  EXPECT_THAT(test::file_text(run / "metrics/Train/Samples/lr"),
              MatchesRegex("[0-9]{13} 0.25 8\n[0-9]{13} 0.125 16\n"));
  EXPECT_THAT(test::file_text(run / "metrics/__/out_"), EndsWith(" 1 8\n"));
  EXPECT_THAT(test::file_text(run.parent_path() / "meta.yaml"),
              AllOf(HasSubstr("name: \"my: job\"\n"),
                    HasSubstr("experiment_id: '" + run.parent_path().filename().string() + "'\n")));
  make_mlflow_monitor(folder.path().string(), "my: job");
  const fs::path experiment = only_folder(folder.path());
  EXPECT_EQ(std::distance(fs::directory_iterator(experiment), fs::directory_iterator()), 3) << "meta.yaml and two runs";
}

}  // namespace
}  // namespace ds::profiling
