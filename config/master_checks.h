// What fp16, bf16 and optimizer.params say about masters and optimizer states of 16 bits. Torch-free.
#pragma once

#include "core/json/json_problems.h"
#include "dsengine/config.h"

namespace ds::engine::config {

// As DeepSpeed refuses it: masters of 16 bits need stages 1 to 3, offload_optimizer and CPU Adam, but for bfloat16 ones
// whose states are bfloat16, too, on the device.
void check_masters(const DsConfig& config, JsonProblems& problems);

}  // namespace ds::engine::config
