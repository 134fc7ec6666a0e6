#include "pipeline/schedule/schedule_timing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace ds::pipeline {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using enum ScheduleKind;

constexpr double kRounding = 1e-9;

Timetable in_unit_times(const Schedule& schedule) { return simulate(schedule, {StageTimes()}); }

double share(double part, double whole) { return part / whole; }

struct Grid {
  int ranks;
  int micro_batches;
};

// Pipelines that come into step: at least twice as many micro-batches as ranks.
std::vector<Grid> grid() {
  std::vector<Grid> points;
  for (int ranks = 1; ranks <= 10; ++ranks) {
    for (int micro_batches = 2 * ranks; micro_batches <= 4 * ranks + 3; ++micro_batches) {
      points.push_back({ranks, micro_batches});
    }
  }
  return points;
}

TEST(ScheduleTiming, BubblesOfGPipeAnd1F1B) {
  for (const auto& [p, m] : grid()) {
    for (const ScheduleKind kind : {kGPipe, k1F1B}) {
      const Timetable table = in_unit_times(make_schedule(kind, {.ranks = p, .micro_batches = m}));
      EXPECT_NEAR(table.bubble(), share(p - 1, m + p - 1), kRounding) << p << ' ' << m;
      EXPECT_NEAR(table.idle(), share(p - 1, m + p - 1), kRounding) << p << ' ' << m;
      EXPECT_NEAR(table.makespan, 3 * (m + p - 1), kRounding) << p << ' ' << m;
    }
  }
}

// Not for multiples of the ranks alone.
TEST(ScheduleTiming, BubbleOfInterleaved) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = p; m <= 3 * p + 2; ++m) {
      for (int v = 2; v <= 4; ++v) {
        const Timetable table = in_unit_times(make_schedule(kInterleaved, {p, v, m}));
        EXPECT_NEAR(table.bubble(), share(p - 1, v * m + p - 1), kRounding) << p << ' ' << m << ' ' << v;
      }
    }
  }
}

TEST(ScheduleTiming, BubblesOfZeroBubbleSchedules) {
  for (const auto& [p, m] : grid()) {
    const Timetable h1 = in_unit_times(make_schedule(kZbH1, {.ranks = p, .micro_batches = m}));
    EXPECT_NEAR(h1.bubble(), share(p - 1, 3 * m + p - 1), kRounding) << p << ' ' << m;
    const Timetable h2 = in_unit_times(make_schedule(kZbH2, {.ranks = p, .micro_batches = m}));
    EXPECT_NEAR(h2.bubble(), 0, kRounding) << p << ' ' << m;
    const Timetable v = in_unit_times(make_schedule(kZbV, {.ranks = p, .chunks = 2, .micro_batches = m}));
    EXPECT_NEAR(v.bubble(), 0, kRounding) << p << ' ' << m;
    // A stage of a V is half as large: beside 1f1b's 6(p-1) half units, idle time is a sixth.
    const Timetable dual = in_unit_times(make_schedule(kDualPipeV, {.ranks = p, .chunks = 2, .micro_batches = m}));
    EXPECT_NEAR(dual.bubble(), share(p - 1, 6 * m + p - 1), kRounding) << p << ' ' << m;
  }
}

TEST(ScheduleTiming, ActivationsAtOnce) {
  constexpr double kShare = 0.25;
  for (const auto& [p, m] : grid()) {
    const auto peaks = [&, p = p, m = m](ScheduleKind kind, int chunks) {
      return peak_activations(make_schedule(kind, {p, chunks, m}), kShare);
    };
    for (int r = 0; r < p; ++r) {
      SCOPED_TRACE(cat(p, " ranks, ", m, " micro-batches, rank ", r));
      EXPECT_NEAR(peaks(kGPipe, 1)[r], m, kRounding);
      EXPECT_NEAR(peaks(k1F1B, 1)[r], p - r, kRounding);
      EXPECT_NEAR(peaks(kZbH1, 1)[r], p - r + r * kShare, kRounding);
      EXPECT_NEAR(peaks(kZbH2, 1)[r], 2 * (p - r) - 1 + 2 * r * kShare, kRounding);
      EXPECT_LE(peaks(kZbV, 2)[r], 2 * p + kRounding);
      EXPECT_LE(peak_activations(make_schedule(kZbV, {p, 2, m}), 1.0)[r], 2 * p + kRounding);
      EXPECT_LE(peaks(kDualPipeV, 2)[r], 2 * p + 1 + kRounding);
      EXPECT_NEAR(peaks(kInference, 3)[r], 1, kRounding);
    }
  }
  EXPECT_THAT(peak_activations(make_schedule(k1F1B, {.ranks = 6, .micro_batches = 2})), ElementsAre(2, 2, 2, 2, 2, 1));
}

TEST(ScheduleTiming, ActivationsOfUnequalStages) {
  const Schedule schedule = make_schedule(kZbV, {.ranks = 2, .chunks = 2, .micro_batches = 1});
  EXPECT_THAT(peak_activations(schedule, {1, 10, 100, 1000}), ElementsAre(1001, 110));
  EXPECT_THROW(peak_activations(schedule, std::vector<double>(3, 1.0)), UsageError);
}

// Narayanan et al., section 2.2, for the first rank: 1 + (p-1)/(pv) times the p whole activations of 1f1b.
TEST(ScheduleTiming, ActivationsOfInterleaved) {
  for (int p = 2; p <= 8; ++p) {
    for (int v = 2; v <= 4; ++v) {
      const std::vector<double> peaks = peak_activations(make_schedule(kInterleaved, {p, v, 3 * p}));
      EXPECT_NEAR(peaks[0] / v, p * (1 + share(p - 1, p * v)), kRounding) << p << ' ' << v;
      for (int r = 0; r < p; ++r) EXPECT_EQ(peaks[r], 2 * (p - r - 1) + (v - 1) * p + 1) << p << ' ' << v << ' ' << r;
    }
  }
}

TEST(ScheduleTiming, EveryActionOnceAndWithoutOverlap) {
  const Schedule schedule = make_schedule(kDualPipeV, {.ranks = 4, .chunks = 2, .micro_batches = 9});
  const Timetable table = simulate(schedule, {{1, 2, 0.5}}, 0.25);
  ASSERT_EQ(table.ranks.size(), 4U);
  double last = 0;
  for (size_t rank = 0; rank < 4; ++rank) {
    std::vector<Action> computed;
    double clock = 0;
    for (const TimedAction& timed : table.ranks[rank]) {
      EXPECT_GE(timed.start, clock);
      clock = timed.end;
      computed.push_back(timed.action);
    }
    last = std::max(last, clock);
    std::vector<Action> planned = schedule.actions[rank];
    std::erase_if(planned, [](const Action& action) { return !is_compute(action.kind); });
    EXPECT_EQ(computed, planned);
    EXPECT_NEAR(table.busy(static_cast<int>(rank)), 2 * 9 * 3.5, kRounding);
  }
  EXPECT_EQ(table.makespan, last);
}

TEST(ScheduleTiming, StagesAndMessagesTakeTheirTime) {
  const Schedule schedule = make_schedule(kGPipe, {.ranks = 2, .micro_batches = 1});
  const Timetable table = simulate(schedule, {{1, 2, 3}, {10, 20, 30}}, 100);
  ASSERT_EQ(table.ranks[0].size(), 2U);
  EXPECT_EQ(table.ranks[0][0].end, 1);
  EXPECT_EQ(table.ranks[1][0].start, 101);
  EXPECT_EQ(table.ranks[1][0].end, 111);
  EXPECT_EQ(table.ranks[1][1].end, 161);
  EXPECT_EQ(table.ranks[0][1].start, 261);
  EXPECT_EQ(table.makespan, 266);
  EXPECT_EQ(table.span(0), 266);
  EXPECT_EQ(table.span(1), 60);
  EXPECT_NEAR(table.bubble(), 1 - share(6, 266), kRounding);
  EXPECT_NEAR(table.idle(), 1 - share(66, 532), kRounding);
}

TEST(ScheduleTiming, MessagesOfEachBoundaryWaitForOneAnother) {
  const Schedule schedule = make_schedule(kGPipe, {.ranks = 3, .micro_batches = 2});
  const Timetable table =
      simulate(schedule, {{1, 1, 1}}, {{.transfer = 10, .latency = 3}, {.transfer = 0, .latency = 5}});
  EXPECT_EQ(table.ranks[1][0].start, 1 + 10 + 3);
  EXPECT_EQ(table.ranks[1][1].start, 1 + 20 + 3);  // computed at 2, on its way once the first has left
  EXPECT_EQ(table.ranks[2][0].start, 15 + 5);
  EXPECT_EQ(table.ranks[2][1].start, 25 + 5);
  EXPECT_THAT([&] { simulate(schedule, {{}}, std::vector<MessageTimes>(3)); },
              ThrowsMessage<ConfigError>(HasSubstr("each of 2 boundaries of stages, found 3")));
  EXPECT_THAT(
      [&] {
        simulate(schedule, {{}}, {{.transfer = -1}, {}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("found -1")));
}

// Ways are of ranks: of two chunks in turns, messages of either go from the first rank to the second.
TEST(ScheduleTiming, ChunksShareTheWayBetweenTheirRanks) {
  const Schedule schedule = with_messages("two chunks", {.ranks = 2, .chunks = 2, .micro_batches = 1}, {0, 1, 0, 1},
                                          {{{ActionKind::kForward, 0, 0},
                                            {ActionKind::kForward, 2, 0},
                                            {ActionKind::kBackward, 2, 0},
                                            {ActionKind::kBackward, 0, 0}},
                                           {{ActionKind::kForward, 1, 0},
                                            {ActionKind::kForward, 3, 0},
                                            {ActionKind::kBackward, 3, 0},
                                            {ActionKind::kBackward, 1, 0}}});
  const Timetable table = simulate(schedule, {{1, 1, 1}}, {{.transfer = 4}});
  EXPECT_EQ(table.makespan, 4 * 3 + 6 * 4);
}

TEST(ScheduleTiming, NothingTakesNoTime) {
  const Timetable table = simulate(make_schedule(kGPipe, {.ranks = 2}), {{0, 0, 0}});
  EXPECT_EQ(table.makespan, 0);
  EXPECT_EQ(table.bubble(), 0);
  EXPECT_EQ(table.idle(), 0);
}

TEST(ScheduleTiming, WrongTimesAndSchedulesAreRefused) {
  Schedule schedule = make_schedule(kGPipe, {.ranks = 3});
  EXPECT_THAT(
      [&] {
        simulate(schedule, {{}, {}});
      },
      ThrowsMessage<ConfigError>(HasSubstr("each of 3 stages, found 2")));
  EXPECT_THAT([&] { simulate(schedule, {{1, -1, 1}}); }, ThrowsMessage<ConfigError>(HasSubstr("found -1")));
  EXPECT_THROW(simulate(schedule, {{}}, -1), ConfigError);
  schedule.actions[0].clear();
  EXPECT_THAT([&] { simulate(schedule, {{}}); }, ThrowsMessage<ConfigError>(HasSubstr("mistakes")));
}

TEST(ScheduleTiming, TypicalTimesAreMedians) {
  const Schedule schedule = make_schedule(kGPipe, {.ranks = 2, .micro_batches = 3});
  Timetable measured = simulate(schedule, {{4, 1, 2}, {8, 3, 3}});
  measured.ranks[0][0].end += 1000;  // the first of everything is slow
  const std::vector<StageTimes> times = typical_times(schedule, measured);
  ASSERT_EQ(times.size(), 2U);
  EXPECT_EQ(times[0].forward, 4);
  EXPECT_EQ(times[0].backward_input, 1.5);  // of whole backwards, a half
  EXPECT_EQ(times[0].backward_weight, 1.5);
  EXPECT_EQ(times[1].forward, 8);

  const Schedule parts = make_schedule(kZbH1, {.ranks = 2, .micro_batches = 3});
  const std::vector<StageTimes> of_parts = typical_times(parts, simulate(parts, {{4, 1, 2}}));
  EXPECT_EQ(of_parts[1].backward_input, 1);
  EXPECT_EQ(of_parts[1].backward_weight, 2);
}

}  // namespace
}  // namespace ds::pipeline
