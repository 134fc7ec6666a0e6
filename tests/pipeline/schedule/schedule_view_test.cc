#include "pipeline/schedule/schedule_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "core/text.h"
#include "tests/support/count_of.h"

namespace ds::pipeline {
namespace {

using test::count_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using enum ScheduleKind;

std::string drawn(const Schedule& schedule, const StageTimes& times, int width, bool color) {
  return to_terminal(schedule, simulate(schedule, {times}), width, color);
}

TEST(ScheduleView, LettersTellKindsApartWithoutColour) {
  EXPECT_EQ("\n" + drawn(make_schedule(k1F1B, {.ranks = 2, .micro_batches = 3}), {}, 80, false), R"(
rank  bubble  held
   0   25.0%     2  F0F1....B0--F2B1--..B2--
   1    0.0%     1  ..F0B0--F1B1--F2B2--....
time                0         5         10

F forward   B backward   . idle   a column is 1
F1: forward, micro-batch 1
bubble: idle share from a rank's first start to its last end; held: most activations at once
)");
}

TEST(ScheduleView, ChunksAreToldApartByTheirStages) {
  EXPECT_EQ("\n" + drawn(make_schedule(kZbV, {.ranks = 2, .chunks = 2, .micro_batches = 1}), {1, 2, 1}, 80, false), R"(
rank  bubble  held
   0   42.9%     2  0F0 ... ... 3F0 3I0---- 3W0 ... ... ... ... 0I0---- 0W0
   1   27.3%     2  ... 1F0 2F0 ... ... ... 2I0---- 2W0 1I0---- 1W0 ... ...
time                0                   5                   10

F forward   I backward of the input   W backward of the weights   . idle   a column is 1
0F1: stage 0, forward, micro-batch 1
bubble: idle share from a rank's first start to its last end; held: most activations at once
)");
}

TEST(ScheduleView, LongSchedulesAreCutInBands) {
  const Schedule schedule = make_schedule(k1F1B, {.ranks = 3, .micro_batches = 20});
  for (const int width : {30, 47, 80}) {
    const std::string text = drawn(schedule, {}, width, false);
    std::istringstream lines(text.substr(0, text.find("F forward")));
    size_t cells = 0;
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), static_cast<size_t>(width)) << line;
      if (line.starts_with("   0 ")) cells += line.size() - 20;
    }
    EXPECT_EQ(cells, 3U * 66) << text;  // 3 (m + p - 1) columns of three characters
    EXPECT_EQ(count_of(text, "F19"), 3U) << text;
  }
}

TEST(ScheduleView, ColoursHaveTheSamePlaces) {
  const Schedule schedule = make_schedule(kZbV, {.ranks = 2, .chunks = 2, .micro_batches = 12});
  const std::string text = drawn(schedule, {}, 400, true);
  EXPECT_THAT(text, AllOf(HasSubstr("\x1b[48;5;25;38;5;231m  0\x1b[0m"), HasSubstr("chunks take turns")));
  const std::string plain = std::regex_replace(text, std::regex("\x1b\\[[0-9;]*m"), "");
  EXPECT_THAT(plain, AllOf(Not(HasSubstr("\x1b")), HasSubstr("  0  1  2  0  0  0  1  1  1  3  0  0")));
  std::istringstream lines(plain);
  std::string heading;
  std::string first;
  std::string second;
  std::getline(lines, heading);
  std::getline(lines, first);
  std::getline(lines, second);
  EXPECT_EQ(first.size(), second.size());
  EXPECT_EQ(first.size(), 20U + 3 * (6 * 12 + 1));
}

TEST(ScheduleView, TimesNeedNotBeWholeNumbers) {
  const Schedule schedule = make_schedule(kGPipe, {.ranks = 1, .micro_batches = 1});
  EXPECT_THAT(drawn(schedule, {0.5, 0.6, 0.7}, 80, false), AllOf(HasSubstr("F0B0----"), HasSubstr("a column is 0.5")));
  EXPECT_THAT(drawn(schedule, {0, 0, 0}, 80, false), HasSubstr("held"));
  EXPECT_LT(drawn(schedule, {1e-9, 1e9, 1}, 80, false).size(), 1'000'000U);
}

TEST(ScheduleView, OneMicroBatchAsSvg) {
  const Schedule schedule = make_schedule(kGPipe, {.ranks = 1, .micro_batches = 1});
  const std::string svg = to_svg(schedule, simulate(schedule, {{1, 0.5, 1}}));
  const size_t style = svg.find("<style>");
  const size_t end = svg.find("</style>\n");
  ASSERT_NE(end, std::string::npos);
  EXPECT_EQ("\n" + svg.substr(0, style) + svg.substr(end + 9), R"(
<svg xmlns="http://www.w3.org/2000/svg" width="444" height="134" viewBox="0 0 444 134">
<title>gpipe: 1 rank, 1 stage a rank, 1 micro-batch</title>
<text x="64" y="20" class="title">gpipe: 1 rank, 1 stage a rank, 1 micro-batch</text>
<text x="64" y="42">bubble 0.0%, idle 0.0%, 2.5 in all</text>
<text x="8" y="65">rank 0</text>
<rect x="64" y="50" width="60" height="22" class="idle"/>
<rect x="64" y="50" width="24" height="22" class="F0"><title>0F0: 0 to 1</title></rect>
<text x="76" y="65" class="number">0</text>
<rect x="88" y="50" width="36" height="22" class="B0"><title>0B0: 1 to 2.5</title></rect>
<text x="106" y="65" class="number">0</text>
<line x1="64" y1="76" x2="64" y2="81" class="tick"/>
<text x="64" y="93" class="number">0</text>
<rect x="64" y="104" width="12" height="22" class="F0"/>
<text x="82" y="119">forward</text>
<rect x="254" y="104" width="12" height="22" class="B0"/>
<text x="272" y="119">backward</text>
</svg>
)");
}

TEST(ScheduleView, SvgHasABoxForEveryAction) {
  const Schedule schedule = make_schedule(kDualPipeV, {.ranks = 3, .chunks = 2, .micro_batches = 8});
  const Timetable plan = simulate(schedule, {{}});
  const std::string svg = to_svg(schedule, plan);
  size_t actions = 0;
  for (const auto& list : plan.ranks) actions += list.size();
  EXPECT_EQ(count_of(svg, "</title></rect>"), actions + 8);  // and two in the legend for each of four kinds
  EXPECT_EQ(count_of(svg, "<rect"), actions + 8 + 3);
  EXPECT_EQ(count_of(svg, "<text"), count_of(svg, "</text>"));
  EXPECT_THAT(svg, AllOf(HasSubstr("<title>dualpipev: 3 ranks, 2 stages a rank, 8 micro-batches</title>"),
                         HasSubstr("<title>0F0: 0 to 1</title>"), HasSubstr("rank 2"), Not(HasSubstr("measured"))));
  EXPECT_EQ(svg, to_svg(schedule, plan));
}

TEST(ScheduleView, WhatWasMeasuredLiesBelowToTheSameScale) {
  const Schedule schedule = make_schedule(kGPipe, {.ranks = 2, .micro_batches = 2});
  const Timetable plan = simulate(schedule, {{}});
  const Timetable measured = simulate(schedule, {{2, 1, 1}});
  const std::string svg = to_svg(schedule, plan, &measured);
  EXPECT_LT(svg.find("planned: "), svg.find("measured: "));
  // The shortest of the plan, a forward, is 24 wide: 0F0 in both, of one and of two units.
  EXPECT_THAT(svg, AllOf(HasSubstr("width=\"24\" height=\"22\" class=\"F0\"><title>0F0: 0 to 1</title>"),
                         HasSubstr("width=\"48\" height=\"22\" class=\"F0\"><title>0F0: 0 to 2</title>")));
}

TEST(ScheduleView, NamesAreEscaped) {
  Schedule schedule = make_schedule(kGPipe, {.ranks = 1});
  schedule.name = "a<b>&\x01";
  EXPECT_THAT(to_svg(schedule, simulate(schedule, {{}})), HasSubstr("<title>a&lt;b&gt;&amp;?: "));
}

}  // namespace
}  // namespace ds::pipeline
