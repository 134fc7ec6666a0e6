// The files that this process has open, also those without a name.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace ds::offload {

// Descriptors, as paths below /proc, of open files whose path contains `part`.
inline std::vector<std::string> open_descriptors_of(const std::string& part) {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!gone && target.find(part) != std::string::npos) found.push_back(entry.path().string());
  }
  return found;
}

inline void truncate_descriptor(const std::string& descriptor, int64_t bytes) {
  if (::truncate(descriptor.c_str(), bytes) != 0) throw std::runtime_error("cannot truncate " + descriptor);
}

}  // namespace ds::offload
