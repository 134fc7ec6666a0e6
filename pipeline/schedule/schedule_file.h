// A user's own schedule, in the CSV form of torch.distributed.pipelining: a line for each rank, a cell for each compute
// action ("0F0,1F0,,1B0,0B0"); empty cells are idle time and mean nothing. Torch-free.
#pragma once

#include <string>

#include "pipeline/schedule/schedule.h"

namespace ds::pipeline {

// Whether pipeline.schedule names a file rather than a kind: it ends in ".csv".
bool is_schedule_file(const std::string& name);

// Stages are placed where their actions are. Throws ConfigError naming file, line and cell, and for a schedule that is
// not sound; IoError for a file that cannot be read.
Schedule read_schedule(const std::string& path);
Schedule parse_schedule(const std::string& text, const std::string& name);

// The compute actions of a schedule.
std::string to_csv(const Schedule& schedule);

}  // namespace ds::pipeline
