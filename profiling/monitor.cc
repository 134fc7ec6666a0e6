#include "profiling/monitor.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/check.h"
#include "core/files/dangling_link.h"
#include "core/log.h"
#include "core/system_call.h"
#include "core/text.h"

namespace ds::profiling {

void MonitorList::write_events(const std::vector<Event>& events) {
  if (events.empty()) return;
  std::erase_if(monitors_, [&](const std::unique_ptr<Monitor>& monitor) {
    try {
      monitor->write_events(events);
      return false;
    } catch (const std::exception& error) {
      log::error(error.what(), ". Training goes on without this monitor; what it has written stays");
      return true;
    }
  });
}

std::string shortest_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void fail_to_write(const char* section, const std::string& path) {
  throw IoError(cat(section, ": cannot write ", path, ": ", SystemReason(errno), " (set ", section,
                    ".output_path to a folder that can be written)"));
}

std::string make_monitor_folder(const std::string& output_path, const std::string& job_name, const char* section) {
  const std::filesystem::path folder = std::filesystem::path(output_path) / job_name;
  const std::string dangling = dangling_link(folder);
  require<IoError>(dangling.empty(), section, ": cannot write ", folder.native(), ": ", dangling, " (set ", section,
                   ".output_path to a folder that can be written)");
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  errno = error.value();
  if (error) fail_to_write(section, folder.string());
  const std::filesystem::path probe = folder / cat(".write_test.", ::getpid());
  if (!classic_stream<std::ofstream>(probe)) fail_to_write(section, folder.string());
  std::filesystem::remove(probe, error);
  return folder.string();
}

}  // namespace ds::profiling
