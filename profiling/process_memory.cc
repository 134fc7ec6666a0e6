#include "profiling/process_memory.h"

#include <fstream>
#include <sstream>
#include <string>

#include "core/check.h"

namespace ds::profiling {
namespace {

constexpr int64_t kBytesPerKilobyte = 1024;

// "VmHWM:    1234 kB"
int64_t read_status(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(key)) continue;
    std::istringstream rest(line.substr(key.size()));
    int64_t kilobytes = 0;
    if (rest >> kilobytes) return kilobytes * kBytesPerKilobyte;
  }
  throw IoError(cat("memory of this process: expected a line \"", key, "\" in /proc/self/status, found none"));
}

}  // namespace

int64_t resident_bytes() { return read_status("VmRSS:"); }
int64_t peak_resident_bytes() { return read_status("VmHWM:"); }

}  // namespace ds::profiling
