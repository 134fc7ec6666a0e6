// Rules that tie keys of different sections together.
#pragma once

#include "core/json/json_problems.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// Errors for settings that exclude each other (both keys are named), warnings for settings without effect here.
void check_across_sections(const DsConfig& config, JsonProblems& problems);

}  // namespace ds::engine::config
