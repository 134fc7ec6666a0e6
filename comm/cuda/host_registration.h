// Pinning of host memory that is mapped already. Both as comm/backends/cuda_plugin.h says.
#pragma once

#include <cstddef>
#include <string>

namespace ds::comm {

std::string register_host_memory(void* data, size_t bytes);
void unregister_host_memory(void* data);

}  // namespace ds::comm
