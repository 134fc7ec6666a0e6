// When the actions of a schedule ran, as they were measured. Torch-free.
#pragma once

#include <string>

#include "pipeline/schedule/schedule.h"
#include "pipeline/schedule/schedule_timing.h"

namespace ds::pipeline {

// A trace of one step in Chrome's trace event format, as stage_runner writes it: complete events (ph "X") with tid =
// rank, name as to_text(), ts and dur in microseconds. Other events are left out. `path`: one file for all ranks, or a
// folder with one for each (every *.json in it). The first action starts at 0. Throws IoError for what cannot be read,
// ConfigError for a trace without each compute action of the schedule once on its rank.
Timetable read_trace(const std::string& path, const Schedule& schedule);

}  // namespace ds::pipeline
