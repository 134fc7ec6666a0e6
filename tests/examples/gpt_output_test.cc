// What a run writes: the metrics file and the progress line.
#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/check.h"
#include "examples/gpt/metrics_file.h"
#include "examples/gpt/progress_bar.h"
#include "tests/support/scratch_folder.h"

namespace gpt {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

std::vector<nlohmann::json> lines_of(const std::string& path) {
  std::ifstream in(path);
  std::vector<nlohmann::json> result;
  for (std::string line; std::getline(in, line);) result.push_back(nlohmann::json::parse(line));
  return result;
}

TEST(MetricsFile, AppendsForARunThatGoesOn) {
  const ds::test::ScratchFolder folder;
  for (const bool append : {false, true})
    MetricsFile(folder / "m.jsonl", append).write(StepMetrics{.step = append + 1});
  EXPECT_EQ(lines_of(folder / "m.jsonl").size(), 2U);
  MetricsFile anew(folder / "m.jsonl");
  EXPECT_EQ(lines_of(folder / "m.jsonl").size(), 0U);
}

TEST(MetricsFile, OneObjectALineWholeAfterEachWrite) {
  const ds::test::ScratchFolder folder;
  MetricsFile file(folder / "m.jsonl");
  file.write(StepMetrics{
      .step = 1, .loss = 5.5, .grad_norm = 2.25, .lr = 1e-3, .step_seconds = 0.5, .tokens_per_second = 2048});
  ASSERT_EQ(lines_of(folder / "m.jsonl").size(), 1U);
  file.write(StepMetrics{.step = 2,
                         .loss = 0.1,
                         .grad_norm = std::numeric_limits<double>::infinity(),
                         .loss_scale = 65536,
                         .skipped = true});
  file.write(RunSummary{.world_size = 2,
                        .parameters = 7,
                        .peak_rss_bytes = {1, 2},
                        .model_state_bytes = {3, 4},
                        .comm_bytes_sent = {5, 6},
                        .median_step_seconds = 0.25});
  const auto lines = lines_of(folder / "m.jsonl");
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0], nlohmann::json({{"step", 1},
                                      {"loss", 5.5},
                                      {"grad_norm", 2.25},
                                      {"lr", 1e-3},
                                      {"loss_scale", 1.0},
                                      {"skipped", false},
                                      {"step_seconds", 0.5},
                                      {"tokens_per_second", 2048.0}}));
  EXPECT_TRUE(lines[1]["grad_norm"].is_null());
  EXPECT_EQ(lines[1]["loss"].get<double>(), 0.1) << "doubles are written with all their digits";
  EXPECT_TRUE(lines[1]["skipped"].get<bool>());
  EXPECT_EQ(lines[2], nlohmann::json({{"summary",
                                       {{"world_size", 2},
                                        {"parameters", 7},
                                        {"peak_rss_bytes", {1, 2}},
                                        {"model_state_bytes", {3, 4}},
                                        {"comm_bytes_sent", {5, 6}},
                                        {"median_step_seconds", 0.25}}}}));
}

TEST(MetricsFile, APathThatCannotBeWrittenIsRefusedAtOnce) {
  EXPECT_THAT([] { MetricsFile("/no/such/folder/m.jsonl"); },
              ThrowsMessage<ds::IoError>(HasSubstr("/no/such/folder/m.jsonl")));
}

TEST(MetricsFile, AFullDiskIsAnError) {
  MetricsFile file("/dev/full");
  EXPECT_THAT([&] { file.write(StepMetrics{}); }, ThrowsMessage<ds::IoError>(HasSubstr("/dev/full")));
}

std::string shown(int columns, int64_t steps) {
  testing::internal::CaptureStdout();
  ProgressBar bar(steps, columns);
  for (int64_t step = 1; step <= steps; ++step) bar.show(step, 5.0, 0.5, 12000);
  bar.finish();
  return testing::internal::GetCapturedStdout();
}

TEST(ProgressBar, PlainLinesWithoutATerminal) {
  const std::string text = shown(0, 100);
  EXPECT_THAT(text, HasSubstr("step 1/100  loss 5.000  24,000 tokens/s  0:50 left\n"));
  EXPECT_THAT(text, HasSubstr("step 100/100  loss 5.000  24,000 tokens/s  0:00 left\n"));
  EXPECT_THAT(text, Not(HasSubstr("\r")));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(ProgressBar, OneLineRedrawnOnATerminal) {
  const std::string text = shown(80, 100);
  EXPECT_TRUE(text.starts_with("\rstep 1/100  [..")) << text;
  EXPECT_THAT(text, HasSubstr("\rstep 100/100  [##"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << "finish() ends the line";
}

TEST(ProgressBar, ALineNeverWraps) {
  for (const int columns : {50, 60, 80, 100, 200}) {
    std::stringstream drawings(shown(columns, 1000));
    std::string drawing;
    std::getline(drawings, drawing, '\r');
    while (std::getline(drawings, drawing, '\r')) {
      EXPECT_LT(drawing.find("\x1b"), static_cast<size_t>(columns)) << drawing;
    }
  }
}

}  // namespace
}  // namespace gpt
