// The folder a monitor writes into. Torch-free.
#pragma once

#include <string>

namespace ds::profiling {

// Makes output_path/job_name and the folders above it. Throws IoError naming the folder and the system's reason, also
// when files cannot be made in it. `section` is the config section to name ("csv_monitor").
std::string make_monitor_folder(const std::string& output_path, const std::string& job_name, const char* section);

// Throws IoError with the system's reason (errno).
[[noreturn]] void fail_to_write(const char* section, const std::string& path);

}  // namespace ds::profiling
