// Reads schedules of difficulties and metrics of samples, and checks what their keys mean.
#pragma once

#include "core/json/json_fields.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// Sets the schedules of a section that is enabled, or tells `json` what is missing or wrong.
void read_schedule(JsonFields& json, CurriculumLearningSection& section);
void read_schedule(JsonFields& json, DataEfficiencySection& section);

// Reads the object data_efficiency.data_sampling.curriculum_learning.curriculum_metrics and
// `section.curriculum_metrics`, its keys (sample_metrics.cc): sets `section.metrics`, or tells `json` what is missing
// or wrong.
void describe_sample_metrics(JsonFields& json, CurriculumSection& section);

}  // namespace ds::engine::config
