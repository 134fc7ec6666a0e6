// Traces of ranks by hand: joined on one clock, and what the checker finds.
#include "tools/trace_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace ds::tool {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::ThrowsMessage;

json span(const std::string& name, double ts, double dur, const json& tid = 7) {
  return {{"ph", "X"}, {"cat", "user_annotation"}, {"name", name}, {"pid", 42}, {"tid", tid}, {"ts", ts}, {"dur", dur}};
}

json trace_of(int rank, int64_t base, const std::vector<json>& events) {
  return {{"distributedInfo", {{"rank", rank}}}, {"baseTimeNanoseconds", base}, {"traceEvents", events}};
}

TEST(MergedTraces, HaveOneClockAndAProcessForEachRank) {
  const json label = {{"ph", "M"}, {"name", "process_labels"}, {"pid", 42}, {"tid", 0}, {"args", {{"labels", "CPU"}}}};
  const json flow = {{"ph", "s"}, {"id", 3}, {"pid", 42}, {"tid", 7}, {"ts", 1.5}, {"name", "fwdbwd"}};
  const json merged = merge_traces({{.path = "a", .trace = trace_of(0, 5000, {label, span("step", 1, 2), flow})},
                                    {.path = "b", .trace = trace_of(1, 2000, {label, span("step", 4.5, 2), flow})}});
  EXPECT_THAT(check_trace(merged).mistakes, IsEmpty());
  EXPECT_EQ(merged["baseTimeNanoseconds"], 2000);
  std::map<int64_t, double> begins;
  std::map<int64_t, std::string> names;
  std::vector<std::string> flows;
  for (const json& event : merged["traceEvents"]) {
    const auto pid = event["pid"].get<int64_t>();
    if (event["ph"] == "X") begins[pid] = event["ts"].get<double>();
    if (event["name"] == "process_name") names[pid] = event["args"]["name"].get<std::string>();
    if (event["ph"] == "s") flows.push_back(event["id"].get<std::string>());
  }
  EXPECT_THAT(begins, ElementsAre(Pair(0, 4.0), Pair(1000, 4.5)));
  EXPECT_THAT(names, ElementsAre(Pair(0, "rank 0 CPU"), Pair(1000, "rank 1 CPU")));
  EXPECT_THAT(flows, ElementsAre("0:3", "1:3"));
}

TEST(MergedTraces, SayWhatIsMissing) {
  const TraceFile first{.path = "a", .trace = trace_of(0, 0, {})};
  EXPECT_THAT(
      [&] {
        merge_traces({first, {.path = "b", .trace = trace_of(0, 0, {})}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("b: expected one trace for each rank, found another of rank 0, a")));
  EXPECT_THAT(
      [&] {
        merge_traces({{.path = "c", .trace = {{"traceEvents", json::array()}}}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("c: expected distributedInfo.rank")));
  const test::ScratchFolder folder;
  const std::string path = (folder.path() / "no.json").string();
  EXPECT_THAT([&] { read_trace_file(path); }, ThrowsMessage<IoError>(HasSubstr("no.json: ")));
  std::ofstream(path) << "[1, 2]";
  EXPECT_THAT([&] { read_trace_file(path); }, ThrowsMessage<ConfigError>(HasSubstr("a list \"traceEvents\"")));
  std::ofstream(path) << "{\"traceEvents\": [";
  EXPECT_THAT([&] { read_trace_file(path); }, ThrowsMessage<ConfigError>(HasSubstr("expected JSON")));
}

TEST(CheckedTrace, SumsBytesAndCover) {
  const TraceSummary summary = check_trace(trace_of(0, 0,
                                                    {span("ProfilerStep#3", 0, 100), span("dsengine: step", 10, 60),
                                                     span("all_reduce bucket 0 | data | sent 48 bytes", 20, 10),
                                                     span("all_reduce bucket 1 | data | sent 16 bytes", 30, 10),
                                                     span("outside", 5, 90, 8), span("aten::add", 80, 15)}));
  EXPECT_THAT(summary.mistakes, IsEmpty());
  EXPECT_EQ(summary.spans, 6);
  EXPECT_EQ(summary.steps, 1);
  EXPECT_DOUBLE_EQ(summary.least_cover, 0.75);
  EXPECT_THAT(summary.sent_bytes, ElementsAre(Pair("all_reduce", 64)));
}

TEST(CheckedTrace, FindsWhatIsWrong) {
  const auto mistakes = [](const std::vector<json>& events) { return check_trace(trace_of(0, 0, events)).mistakes; };
  EXPECT_THAT(mistakes({span("a", 0, 10), span("b", 5, 10)}),
              ElementsAre(HasSubstr("\"b\" begins in \"a\" and ends behind it")));
  EXPECT_THAT(mistakes({span("a", 0, 10), span("b", 5, 10, "other thread")}), IsEmpty());
  EXPECT_THAT(mistakes({span("a", 0, 10), span("b", 10, 10)}), IsEmpty());
  EXPECT_THAT(mistakes({span("a", 0, -1)}), ElementsAre(HasSubstr("of at least 0 as \"dur\"")));
  json no_time = span("a", 0, 1);
  no_time.erase("ts");
  EXPECT_THAT(mistakes({no_time}), ElementsAre(HasSubstr("expected \"ts\" in an event of kind X")));
  EXPECT_THAT(mistakes({{{"ph", "Q"}}}), ElementsAre(HasSubstr("with \"ph\" X, i, C, M, s, t or f")));
}

}  // namespace
}  // namespace ds::tool
