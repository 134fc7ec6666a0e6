// Reads of files straight into a device's memory, a table of functions of a device's library (core/device_functions.h).
// Torch-free.
#pragma once

#include <cstdint>
#include <string>

#include "core/device_functions.h"

namespace ds::offload {

// NVIDIA's cuFile (GPUDirect Storage), behind functions that need none of its headers. Thread safe.
struct DeviceFileCalls {
  // Returns a handle for a descriptor that is open for direct IO and stays open. Null, with the cause in `reason`,
  // where there is no such library or driver, or the file system has no such reads.
  void* (*open)(int descriptor, std::string& reason) = nullptr;
  void (*close)(void* handle) = nullptr;
  // Reads into memory of the calling thread's current device and returns when the bytes are there: their number, from
  // `offset` on, 0 at the end of the file; below 0, with the cause in `reason`, where it failed.
  int64_t (*read)(void* handle, void* memory, int64_t bytes, int64_t offset, std::string& reason) = nullptr;
};

}  // namespace ds::offload
