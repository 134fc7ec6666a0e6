// Reads of files straight into a device's memory: functions that the library of the device registers when it is loaded.
// Torch-free.
#pragma once

#include <cstdint>
#include <string>

namespace ds::offload {

// NVIDIA's cuFile (GPUDirect Storage), behind functions that need none of its headers. Thread safe.
struct DeviceFileCalls {
  // Of a descriptor that is open for direct IO, and stays so. Null, and why in `reason`: there is no such library or
  // driver, or the file's system has no such reads.
  void* (*open)(int descriptor, std::string& reason) = nullptr;
  void (*close)(void* handle) = nullptr;
  // Into memory of the calling thread's current device; returns when the bytes are there: how many, from the first one
  // on, 0 at the end of the file; below 0, and why in `reason`: it failed.
  int64_t (*read)(void* handle, void* memory, int64_t bytes, int64_t offset, std::string& reason) = nullptr;
};

void set_device_file_calls(const DeviceFileCalls* calls);
// Null: no library of a device is loaded that has them.
const DeviceFileCalls* device_file_calls();

}  // namespace ds::offload
