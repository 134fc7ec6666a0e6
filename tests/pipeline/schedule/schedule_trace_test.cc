#include "pipeline/schedule/schedule_timing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "tests/support/scratch_folder.h"

namespace ds::pipeline {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

json event(const std::string& name, int rank, double start, double duration) {
  return {{"name", name}, {"ph", "X"}, {"pid", 0}, {"tid", rank}, {"ts", start}, {"dur", duration}};
}

const Schedule kSchedule = make_schedule(ScheduleKind::kGPipe, {.ranks = 2});

json good_events() {
  return {event("0B0", 0, 5040, 9),
          event("0F0", 0, 5000, 10),
          event("1F0", 1, 5011, 12),
          event("1B0", 1, 5023, 8),
          event("0SF0", 0, 5010, 1),
          event("optimizer", 0, 5050, 3),
          {{"ph", "M"}, {"name", "process_name"}},
          {{"ph", "i"}, {"name", "0F0"}, {"ts", 1}}};
}

void expect_good(const Timetable& table) {
  ASSERT_EQ(table.ranks.size(), 2U);
  ASSERT_EQ(table.ranks[0].size(), 2U);
  ASSERT_EQ(table.ranks[1].size(), 2U);
  EXPECT_EQ(to_text(table.ranks[0][0].action), "0F0");
  EXPECT_EQ(table.ranks[0][0].start, 0);
  EXPECT_EQ(table.ranks[0][1].start, 40);
  EXPECT_EQ(table.ranks[0][1].end, 49);
  EXPECT_EQ(table.ranks[1][1].end, 31);
  EXPECT_EQ(table.makespan, 49);
}

TEST(ScheduleTrace, OneFileForAllRanks) {
  const test::ScratchFolder folder;
  expect_good(read_trace(folder.write("a.json", good_events().dump()), kSchedule));
  expect_good(read_trace(folder.write("b.json", json{{"traceEvents", good_events()}}.dump()), kSchedule));
}

TEST(ScheduleTrace, AFolderWithAFileForEachRank) {
  const test::ScratchFolder folder;
  for (int rank = 0; rank < 2; ++rank) {
    json own = json::array();
    for (const json& item : good_events()) {
      if (item.value("tid", -1) == rank) own.push_back(item);
    }
    folder.write(cat("rank", rank, ".json"), own.dump());
  }
  folder.write("notes.txt", "not a trace");
  expect_good(read_trace(folder.path().string(), kSchedule));
}

TEST(ScheduleTrace, AnythingElseIsRefused) {
  const test::ScratchFolder folder;
  const auto expect = [&](const json& events, const auto& matcher) {
    const std::string path = folder.write("bad.json", events.dump());
    EXPECT_THAT([&] { read_trace(path, kSchedule); }, ThrowsMessage<ConfigError>(AllOf(HasSubstr(path), matcher)));
  };
  json events = good_events();
  events[1]["tid"] = 1;
  expect(events, HasSubstr("rank 0: no event for 0F0"));
  events = good_events();
  events.push_back(event("0F0", 0, 9000, 1));
  expect(events, HasSubstr("rank 0: 0F0 is there more than once; expected the trace of one step"));
  events = good_events();
  events.push_back(event("1F1", 1, 9000, 1));
  expect(events, HasSubstr("rank 1: an event for 1F1"));
  events = good_events();
  events[0]["tid"] = 2;
  expect(events, HasSubstr("expected a rank in [0, 2) as \"tid\", found 2"));
  events = good_events();
  events[0]["dur"] = "long";
  expect(events, HasSubstr("expected a number as \"dur\", found \"long\""));
  events = good_events();
  events[0]["dur"] = -1;
  expect(events, HasSubstr("found -1"));
  events = good_events();
  events[0].erase("ts");
  expect(events, HasSubstr("expected a number as \"ts\", found none"));
  expect(json::array(), HasSubstr("no event for"));
  expect({{"events", 1}}, HasSubstr("expected a trace"));
  const std::string cut = folder.write("cut.json", "[{\"name\"");
  EXPECT_THAT([&] { read_trace(cut, kSchedule); }, ThrowsMessage<ConfigError>(HasSubstr("expected a trace")));
}

TEST(ScheduleTrace, WhatCannotBeReadIsNamed) {
  const test::ScratchFolder folder;
  EXPECT_THAT([&] { read_trace(folder / "none.json", kSchedule); }, ThrowsMessage<IoError>(HasSubstr("none.json")));
  EXPECT_THAT([&] { read_trace(folder.path().string(), kSchedule); },
              ThrowsMessage<IoError>(HasSubstr("expected traces, *.json")));
}

}  // namespace
}  // namespace ds::pipeline
