// The names of the ways ranks exchange tensors. Torch-free: the config reads them, the factory acts on them.
#pragma once

#include <array>
#include <cstddef>

#include "dsengine/comm.h"

namespace ds::comm {

inline constexpr std::array<const char*, 4> kBackendNames = {"auto", "gloo", "shm", "nccl"};

inline const char* name_of(Backend backend) { return kBackendNames.at(static_cast<size_t>(backend)); }

}  // namespace ds::comm
