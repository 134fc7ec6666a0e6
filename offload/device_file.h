// A file that is read straight into a device's memory, past the host's: aio.use_gds.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace ds::offload {

class DeviceFile {
 public:
  // `descriptor`: open for direct IO, outlives it; `path` for messages. Throws ConfigError that names aio.use_gds: the
  // device is the CPU, or its library cannot read this file so.
  DeviceFile(int descriptor, std::string path, c10::Device device);
  ~DeviceFile();
  DeviceFile(const DeviceFile&) = delete;
  DeviceFile& operator=(const DeviceFile&) = delete;

  // `bytes` from `offset` on to `memory` of the device, at multiples of AioFile::alignment(). Returns when they are
  // there; nothing else uses the memory meanwhile. From any thread. Throws IoError that names the file and the part.
  void read(int64_t offset, void* memory, int64_t bytes) const;

 private:
  std::string path_;
  c10::Device device_;
  void* handle_ = nullptr;
};

}  // namespace ds::offload
