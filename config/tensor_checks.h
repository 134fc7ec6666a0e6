// What tensor_parallel may say beside the other sections. Torch-free.
#pragma once

#include "core/json/json_problems.h"
#include "dsengine/config.h"

namespace ds::engine::config {

void check_tensor_parallel(const DsConfig& config, JsonProblems& problems);

}  // namespace ds::engine::config
