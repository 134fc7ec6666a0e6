#include "profiling/monitor_folder.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/check.h"
#include "core/system_call.h"

namespace ds::profiling {

void fail_to_write(const char* section, const std::string& path) {
  throw IoError(cat(section, ": cannot write ", path, ": ", SystemReason(errno), " (set ", section,
                    ".output_path to a folder that can be written)"));
}

std::string make_monitor_folder(const std::string& output_path, const std::string& job_name, const char* section) {
  const std::filesystem::path folder = std::filesystem::path(output_path) / job_name;
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  errno = error.value();
  if (error) fail_to_write(section, folder.string());
  const std::filesystem::path probe = folder / cat(".write_test.", ::getpid());
  if (!std::ofstream(probe)) fail_to_write(section, folder.string());
  std::filesystem::remove(probe, error);
  return folder.string();
}

}  // namespace ds::profiling
