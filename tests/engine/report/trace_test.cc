// Traces of an engine's steps: what is in them, by the checker of ds-tool, and that bytes are those of the counters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dsengine/errors.h"
#include "dsengine/trace.h"
#include "tests/model/small_run.h"
#include "tests/support/scratch_folder.h"
#include "tests/support/thread_ranks.h"
#include "tools/trace_events.h"

namespace ds::engine {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;
using tool::check_trace;
using tool::read_trace_file;
using tool::TraceSummary;

std::set<std::string> names_of(const nlohmann::json& trace) {
  std::set<std::string> names;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    if (event.value("ph", "") == "X") names.insert(event["name"].get<std::string>());
  }
  return names;
}

class TraceOfSteps : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, TraceOfSteps, ::testing::Values(1, 3));

TEST_P(TraceOfSteps, HasPhasesAndCollectivesWithTheirBytes) {
  const test::ScratchFolder folder;
  std::vector<profiling::OperatorTimes> times;
  std::string table;
  int64_t sent = 0;
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), small_config(GetParam(), /*accumulation=*/2), ranks).engine;
    std::optional<profiling::Profiler> profiler;
    if (ranks.rank() == 0) {  // Kineto has one profiler in a process
      profiler.emplace(profiling::profile({.schedule = {.wait = 1, .active = 2, .repeat = 1},
                                           .on_trace_ready =
                                               [&](profiling::Trace& trace) {
                                                 sent = engine->comm_bytes_sent() - sent;
                                                 times = trace.key_averages();
                                                 table = trace.table(5);
                                                 profiling::write_traces(folder.path().string())(trace);
                                               },
                                           .rank = 0}));
    }
    for (int step = 0; step < 4; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        engine->backward(model->loss(sample(2 * step + micro, ranks.rank())));
        engine->step();
      }
      if (profiler && step == 0) sent = engine->comm_bytes_sent();
      if (profiler) profiler->step();
    }
  });
  const auto file = read_trace_file((folder.path() / "rank_0_step_1.json").string());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator()),
            1);
  const TraceSummary summary = check_trace(file.trace);
  EXPECT_THAT(summary.mistakes, IsEmpty());
  EXPECT_EQ(summary.steps, 2);
  int64_t traced = 0;
  for (const auto& [kind, bytes] : summary.sent_bytes) traced += bytes;
  EXPECT_GT(sent, 0);
  EXPECT_EQ(traced, sent);
  EXPECT_THAT(names_of(file.trace),
              AllOf(Contains("dsengine: backward"), Contains("dsengine: step"), Contains("aten::addmm"),
                    Contains(HasSubstr("reduce_scatter ")), Contains("wait for a collective"),
                    Contains("ProfilerStep#1"), Contains("ProfilerStep#2")));
  if (GetParam() == 3) EXPECT_THAT(names_of(file.trace), Contains(HasSubstr("release ")));
  const auto backward =
      std::find_if(times.begin(), times.end(), [](const auto& row) { return row.name == "dsengine: backward"; });
  ASSERT_NE(backward, times.end());
  EXPECT_EQ(backward->calls, 4);
  EXPECT_LE(backward->self_ms, backward->total_ms);
  EXPECT_THAT(table, AllOf(HasSubstr("self ms"), HasSubstr("further names")));
  EXPECT_EQ(tool::merge_traces({file})["traceEvents"].empty(), false);
}

TEST(TraceOfAConfig, IsWrittenWithoutALineOfCode) {
  const test::ScratchFolder folder;
  nlohmann::ordered_json config = small_config(/*stage=*/2, /*accumulation=*/1);
  config["trace"] = {
      {"enabled", true}, {"output_path", folder.path().string()}, {"warmup", 0}, {"active", 1}, {"ranks", {1}}};
  test::run_ranks(2, [&](comm::Communicator& ranks) {
    SmallNet model;
    const auto engine = start(model.ptr(), config, ranks).engine;
    train(*engine, model, 3);
  });
  const auto file = read_trace_file((folder.path() / "rank_1_step_1.json").string());
  const TraceSummary summary = check_trace(file.trace);
  EXPECT_THAT(summary.mistakes, IsEmpty());
  EXPECT_EQ(summary.steps, 1);
  EXPECT_THAT(names_of(file.trace), AllOf(Contains("dsengine: backward"), Contains("dsengine: step")));
}

TEST(Profile, SaysWhatItRefuses) {
  EXPECT_THAT([] { (void)profiling::profile({.schedule = {.wait = -1}}); },
              ThrowsMessage<UsageError>(HasSubstr("expected a schedule of numbers from 0 on, found wait -1")));
  int traces = 0;
  auto first = profiling::profile({.on_trace_ready = [&](profiling::Trace& trace) {
    ++traces;
    const test::ScratchFolder folder;
    EXPECT_THAT([&] { trace.write("/proc/no/trace.json"); }, ThrowsMessage<IoError>(HasSubstr("/proc/no/trace.json")));
    EXPECT_THAT([&] { trace.write((folder.path() / "t.json").string()); },
                ThrowsMessage<UsageError>(HasSubstr("one call")));
  }});
  EXPECT_THAT([] { (void)profiling::profile({}); },
              ThrowsMessage<UsageError>(HasSubstr("another profiler runs in this process")));
  first.stop();
  first.stop();
  EXPECT_EQ(traces, 1);
  auto second = profiling::profile({.schedule = {.wait = 5}});
  second.step();
}

}  // namespace
}  // namespace ds::engine
