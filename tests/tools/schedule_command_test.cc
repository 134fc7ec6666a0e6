// ds-tool schedule.
#include "tools/schedule_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/text.h"
#include "tests/support/file_text.h"
#include "tests/support/scratch_folder.h"
#include "tests/tools/command_outcome.h"

namespace ds::tool {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Outcome run(const ScheduleOptions& options) {
  return outcome_of([&](auto& out, auto& err) { return schedule(options, out, err); });
}

ScheduleOptions of_kind(const std::string& kind) { return {.kind = kind, .stages = 4, .micro_batches = 8}; }

TEST(ScheduleCommand, PrintsTheTimetable) {
  const Outcome outcome = run(of_kind("1f1b"));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("1f1b: 4 ranks, 1 stage a rank, 8 micro-batches, 48 messages\n"),
                                 HasSubstr("bubble 27.3%; idle 27.3% where all ranks meet at the step; 33 in all\n"),
                                 HasSubstr("\n   0   27.3%     4  F0F1F2F3............B0--F4B1--"),
                                 Not(HasSubstr("\x1b")), Not(HasSubstr("STEP"))));
}

TEST(ScheduleCommand, KindsWithSeveralChunksHaveTwo) {
  EXPECT_THAT(run(of_kind("zbv")).out, HasSubstr("zbv: 4 ranks, 2 stages a rank"));
  EXPECT_THAT(run(of_kind("interleaved")).out, HasSubstr("interleaved: 4 ranks, 2 stages a rank"));
  ScheduleOptions options = of_kind("interleaved");
  options.chunks = 3;
  EXPECT_THAT(run(options).out, HasSubstr("interleaved: 4 ranks, 3 stages a rank"));
}

TEST(ScheduleCommand, ListsActions) {
  ScheduleOptions options = {.kind = "gpipe", .stages = 2, .micro_batches = 1};
  options.list = true;
  EXPECT_THAT(run(options).out, HasSubstr("\nrank 0: 0RB0 0F0 0SF0 0B0 REDUCE REDUCE_TIED STEP\n"));
}

TEST(ScheduleCommand, PrintsOneJsonObject) {
  ScheduleOptions options = of_kind("gpipe");
  options.json = true;
  options.times = "1,0.5,1.5";
  options.message = 0.5;
  const Outcome outcome = run(options);
  ASSERT_EQ(outcome.code, 0);
  const nlohmann::json report = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(report["ok"], true);
  EXPECT_EQ(report["schedule"], "gpipe");
  EXPECT_EQ(report["ranks"], 4);
  EXPECT_EQ(report["messages"], 48);
  EXPECT_EQ(report["planned"]["makespan"], 3 * 11 + 6 * 0.5);
  EXPECT_EQ(report["measured"], nullptr);
  EXPECT_EQ(report["peak_activations"], (std::vector<double>{8, 8, 8, 8}));
  EXPECT_FALSE(report.contains("actions"));
  options.list = true;
  EXPECT_EQ(nlohmann::json::parse(run(options).out)["actions"][0][0], "0F0");
}

TEST(ScheduleCommand, WritesFilesAndReadsThemAgain) {
  const test::ScratchFolder folder;
  ScheduleOptions options = of_kind("zb_h1");
  options.csv = folder / "mine.csv";
  options.svg = folder / "mine.svg";
  ASSERT_EQ(run(options).code, 0);
  EXPECT_THAT(test::file_text(options.svg), AllOf(HasSubstr("<svg"), HasSubstr("zb_h1: 4 ranks")));
  ScheduleOptions again;
  again.file = options.csv;
  const Outcome outcome = run(again);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("mine.csv: 4 ranks"), HasSubstr("bubble 11.1%")));
}

TEST(ScheduleCommand, PlansWithWhatWasMeasured) {
  const test::ScratchFolder folder;
  nlohmann::json events = nlohmann::json::array();
  const auto add = [&](const char* name, int rank, double start, double duration) {
    events.push_back({{"name", name}, {"ph", "X"}, {"tid", rank}, {"ts", start}, {"dur", duration}});
  };
  add("0F0", 0, 100, 10);
  add("1F0", 1, 115, 10);
  add("1B0", 1, 125, 20);
  add("0B0", 0, 150, 20);
  ScheduleOptions options = {.kind = "gpipe", .stages = 2, .micro_batches = 1};
  options.measured = folder.write("trace.json", events.dump());
  options.svg = folder / "both.svg";
  const Outcome outcome = run(options);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("planned:  bubble 50.0%; idle 50.0%"), HasSubstr("60 in all\n"),
                    HasSubstr("measured: bubble 57.1%; idle 57.1%"), HasSubstr("70 in all, microseconds")));
  EXPECT_THAT(test::file_text(options.svg), AllOf(HasSubstr("planned: "), HasSubstr("measured: ")));
}

TEST(ScheduleCommand, MistakesGoToTheErrorStream) {
  const auto expect = [](const ScheduleOptions& options, const std::string& part) {
    const Outcome outcome = run(options);
    EXPECT_EQ(outcome.code, 2) << part;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr(part));
  };
  expect({}, "expected --kind, --stages and --micro_batches, or --file");
  expect({.kind = "gpipe", .stages = 2}, "expected --kind, --stages and --micro_batches");
  expect(of_kind("1f2b"), "did you mean 1f1b?");
  expect({.kind = "gpipe", .stages = 0, .micro_batches = 1}, "found 0");
  expect({.kind = "gpipe", .file = "mine.csv"}, "leave out --kind");
  expect({.kind = "1f1b", .stages = 65536, .micro_batches = 65536}, "expected at most 1048576 for --stages x");
  expect({.kind = "1f1b", .stages = 2, .micro_batches = 2, .message = -1},
         "--message: expected a number of at least 0");
  expect({.file = "no/such.csv"}, "no/such.csv");
  for (const char* times : {"1,1", "1,1,1,1", "1,1,x", "1,1,1,", "1,1,1 "}) {
    ScheduleOptions options = of_kind("gpipe");
    options.times = times;
    expect(options, cat("found \"", times, "\""));
  }
  ScheduleOptions options = of_kind("gpipe");
  options.times = "1,-1,1";
  expect(options, "--times: expected three numbers of at least 0");
  options.times = "";
  options.svg = "no/such/folder/mine.svg";
  expect(options, "no/such/folder/mine.svg");
}

TEST(ScheduleCommand, MessagesOfOddFilesAreShortAndPlain) {
  const test::ScratchFolder folder;
  const auto refusal = [&](const std::string& text) {
    const Outcome outcome = run({.file = folder.write("odd.csv", text)});
    EXPECT_EQ(outcome.code, 2);
    return outcome.err;
  };
  EXPECT_LT(refusal(std::string(1 << 20, 'x')).size(), 1000U);
  EXPECT_THAT(refusal("0F0\x1b[2J,0B0"), AllOf(HasSubstr("\\x1B[2J"), Not(HasSubstr("\x1b"))));
  EXPECT_THAT(refusal("\n"), HasSubstr("found an empty file"));
  EXPECT_THAT(run({.file = "/dev/zero"}).err, HasSubstr("found a device"));
}

TEST(ScheduleCommand, MistakesAreJsonAsWell) {
  ScheduleOptions options = of_kind("zigzag");
  options.json = true;
  const Outcome outcome = run(options);
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["ok"], false);
}

}  // namespace
}  // namespace ds::tool
