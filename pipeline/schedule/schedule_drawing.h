// The common part of drawings of a schedule, in a terminal and as SVG. Torch-free, internal to pipeline/.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/schedule_timing.h"

namespace ds::pipeline {

struct LegendEntry {
  ActionKind kind;
  const char* letter;
  const char* words;
};
inline constexpr std::array<LegendEntry, 4> kLegend = {{
    {ActionKind::kForward, "F", "forward"},
    {ActionKind::kBackward, "B", "backward"},
    {ActionKind::kBackwardInput, "I", "backward of the input"},
    {ActionKind::kBackwardWeight, "W", "backward of the weights"},
}};

// Entries of the kinds that a timetable has.
std::vector<LegendEntry> legend_of(const Timetable& timetable);

// For each stage its chunk: 0 for the first stage of its rank, 1 for the next, and so on.
std::vector<int> chunk_of_stages(const Schedule& schedule);

// The shortest time above 0 that an action takes; 0 when none takes any.
double shortest_action(const Timetable& timetable);
// The time that a column stands for: the shortest action or, where that is a small part of what is common (measured
// times), half the median. 0 for a timetable without actions.
double column_time(const Timetable& timetable);

// The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `least`.
double round_step(double least);

// At most six digits, without needless zeros: "12", "0.5", "1.25e+06".
std::string short_number(double value);

}  // namespace ds::pipeline
