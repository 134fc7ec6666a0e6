// Memory of the simulated GPU: pages of the host, filled with NaN when they are given out and when they are freed.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <string>

#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {

// LibTorch's allocator for cuda, and for pinned memory of the host.
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

void use_on(const c10::DataPtr& memory, size_t stream);

// The functions of comm::CudaPlugin.
std::string register_host_memory(void* data, size_t bytes);
void unregister_host_memory(void* data);

}  // namespace ds::simulated_gpu
