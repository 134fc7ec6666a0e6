// How the simulated GPU takes what a kernel does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {

Access access_to(const void* data, int64_t bytes, bool write);

// Runs at once, after what the stream of this handle was given before. Null: the device has taken it.
const char* run_kernel(void* stream, std::string name, const std::vector<Access>& accesses, std::function<void()> run);

}  // namespace ds::simulated_gpu
