// The level that TORCH_DISTRIBUTED_DEBUG sets, as LibTorch and its users know it. Torch-free.
#pragma once

#include <cstdint>

#include "comm/meeting/environment_reader.h"

namespace ds::comm {

enum class DebugLevel : uint8_t { kOff, kInfo, kDetail };

// Returns the level; kOff where the variable is not set. Throws ConfigError naming it for anything but OFF, INFO and
// DETAIL, in any case.
DebugLevel debug_level(const EnvironmentReader& environment);

}  // namespace ds::comm
