// What tensor_parallel may say beside the other sections. Torch-free.
#pragma once

#include "core/json/json_problems.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// The json pointer of the key that says how many ranks share a layer.
const char* tensor_size_key(const TensorParallelSection& section);

void check_tensor_parallel(const DsConfig& config, JsonProblems& problems);

}  // namespace ds::engine::config
