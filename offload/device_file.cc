#include "offload/device_file.h"

#include <c10/core/DeviceGuard.h>

#include <utility>

#include "core/check.h"
#include "offload/device_file_calls.h"

namespace ds::offload {
namespace {

constexpr const char* kElse = "; use false: files are then read into host memory and copied from there";

}  // namespace

DeviceFile::DeviceFile(int descriptor, std::string path, c10::Device device) : path_(std::move(path)), device_(device) {
  require<ConfigError>(!device_.is_cpu(), "aio.use_gds: expected a GPU whose memory files are read into, found the CPU",
                       kElse);
  const DeviceFileCalls* const calls = device_functions<DeviceFileCalls>();
  require<ConfigError>(calls != nullptr, "aio.use_gds: expected libdsengine_cuda, which calls cuFile, found no such ",
                       "library for ", device_, kElse);
  const c10::DeviceGuard guard(device_);
  std::string reason;
  handle_ = calls->open(descriptor, reason);
  require<ConfigError>(handle_ != nullptr, "aio.use_gds: ", path_, ": expected a file that cuFile reads into ", device_,
                       ", found: ", reason, kElse);
}

DeviceFile::~DeviceFile() {
  if (handle_ != nullptr) device_functions<DeviceFileCalls>()->close(handle_);
}

void DeviceFile::read(int64_t offset, void* memory, int64_t bytes) const {
  const c10::DeviceGuard guard(device_);
  for (int64_t done = 0; done < bytes;) {
    std::string reason;
    const int64_t read = device_functions<DeviceFileCalls>()->read(handle_, static_cast<char*>(memory) + done,
                                                                   bytes - done, offset + done, reason);
    require<IoError>(read > 0, path_, ": read ", bytes, " bytes from offset ", offset, " into ", device_,
                     ": expected all of them, found ", done, ": ", read == 0 ? "the file ends there" : reason);
    done += read;
  }
}

}  // namespace ds::offload
