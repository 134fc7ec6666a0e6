// offload/device_file_calls.h for the simulated GPU: reads of a stream of their own, so that the timeline sees whether
// anything else uses the memory meanwhile. DS_SIMULATED_CUFILE says what goes wrong: "missing", "refuses", "fails",
// "ends", or "half", where each read brings half of what it may.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/system_call.h"
#include "offload/device_file_calls.h"
#include "tests/simulated_gpu/kernel_work.h"
#include "tests/simulated_gpu/reports.h"
#include "tests/simulated_gpu/streams.h"
#include "tests/simulated_gpu/timeline.h"

namespace ds::simulated_gpu {
namespace {

constexpr int64_t kFileStream = -7;  // of no program
std::atomic<int64_t> file_reads = 0;

bool is_asked_for(const char* mishap) {
  const char* const asked = std::getenv("DS_SIMULATED_CUFILE");
  return asked != nullptr && std::strcmp(asked, mishap) == 0;
}

void* open_device_file(int descriptor, std::string& reason) {
  if (is_asked_for("missing")) reason = "no library cuFile: the simulated one is away";
  if (is_asked_for("refuses")) reason = "no GPUDirect Storage on this file system";
  return reason.empty() ? new int(descriptor) : nullptr;
}

void close_device_file(void* handle) { delete static_cast<int*>(handle); }

int64_t read_device_file(void* handle, void* memory, int64_t bytes, int64_t offset, std::string& reason) {
  ++file_reads;
  if (is_asked_for("fails")) reason = cat(SystemReason(EIO));
  if (!reason.empty()) return -1;
  if (is_asked_for("ends")) return 0;
  constexpr int64_t kBlock = 4096;
  if (is_asked_for("half") && bytes > kBlock) bytes = bytes / 2 / kBlock * kBlock;
  Timeline& timeline = Timeline::instance();
  ssize_t read = 0;
  int error = 0;
  const Point end =
      timeline.enqueue(timeline.stream(current_device().index(), kFileStream), "a read of a file",
                       {access_to(memory, bytes, /*write=*/true)}, [&] {
                         read = ::pread(*static_cast<int*>(handle), memory, static_cast<size_t>(bytes), offset);
                         error = errno;
                       });
  timeline.wait(end, "");
  if (read < 0) reason = cat(SystemReason(error));
  return read;
}

constexpr offload::DeviceFileCalls kFileCalls{
    .open = open_device_file, .close = close_device_file, .read = read_device_file};
const bool kFileCallsRegistered = (set_device_functions(&kFileCalls), true);

}  // namespace
}  // namespace ds::simulated_gpu

extern "C" __attribute__((visibility("default"))) int64_t ds_simulated_gpu_file_reads() {
  return ds::simulated_gpu::file_reads.exchange(0);
}
