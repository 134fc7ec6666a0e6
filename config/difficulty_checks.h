// What the keys of a schedule of difficulties mean, checked where they are read.
#pragma once

#include "core/json/json_fields.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// Of sections that are enabled: sets their schedules, or tells `json` what is missing or wrong.
void read_schedule(JsonFields& json, CurriculumLearningSection& section);
void read_schedule(JsonFields& json, DataEfficiencySection& section);

}  // namespace ds::engine::config
