// Draws schedules. Torch-free.
#pragma once

#include <string>

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/schedule_timing.h"

namespace ds::pipeline {

// "1f1b: 4 ranks, 1 stage a rank, 8 micro-batches".
std::string headline(const Schedule& schedule);

// A line for each rank, with its bubble and the activations it holds; a column for the time of the shortest action:
// micro-batches' numbers, '.' for idle time; a scale and a legend below. At most `width` columns of terminal; longer
// ones are cut in several bands. `color`: ANSI colours tell the kinds apart, else F, B, I and W before the numbers, and
// stages before these where a rank has several.
std::string to_terminal(const Schedule& schedule, const Timetable& timetable, int width, bool color);

// A whole SVG document: a row for each rank, boxes to scale, with titles (tooltips). With `measured` its rows lie below
// the plan's, to the same scale.
std::string to_svg(const Schedule& schedule, const Timetable& timetable, const Timetable* measured = nullptr);

}  // namespace ds::pipeline
