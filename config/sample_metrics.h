// The metrics of a curriculum of samples: data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.
#pragma once

#include "core/json/json_fields.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// Of the object that curriculum_metrics is, read from it and from `section.curriculum_metrics`, its keys: sets
// `section.metrics`, or tells `json` what is missing or wrong.
void describe_sample_metrics(JsonFields& json, CurriculumSection& section);

}  // namespace ds::engine::config
