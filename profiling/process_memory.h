// Memory of this process as Linux counts it. Torch-free.
#pragma once

#include <cstdint>

namespace ds::profiling {

// Bytes in memory now (VmRSS), and at most so far (VmHWM). Both count pages shared with other processes and of mapped
// files. Throw IoError where /proc/self/status cannot be read.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace ds::profiling
