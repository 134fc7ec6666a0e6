// The place of flight records, on which ds-launch and the ranks agree (comm/flight/flight_folder.h): those of a job lie
// in the folder $DS_FLIGHT_FOLDER/$DS_FLIGHT_JOB, without DS_FLIGHT_FOLDER in dsengine-UID/$DS_FLIGHT_JOB of the
// temporary folder. Torch-free.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <system_error>

#include "core/text.h"

namespace ds {

inline constexpr const char* kFlightFolderVariable = "DS_FLIGHT_FOLDER";
inline constexpr const char* kFlightJobVariable = "DS_FLIGHT_JOB";

// The folder of all jobs, for a process with these variables. `variable`: the value of one, nothing where it is not
// set.
inline std::string flight_base(const std::function<std::optional<std::string>(const char* name)>& variable) {
  if (const auto given = variable(kFlightFolderVariable); given && !given->empty()) return *given;
  std::filesystem::path temporary = "/tmp";
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {  // as std::filesystem::temp_directory_path()
    const auto folder = variable(name);
    if (!folder || folder->empty()) continue;
    std::error_code error;
    if (std::filesystem::is_directory(*folder, error)) temporary = *folder;
    break;
  }
  return temporary / cat("dsengine-", getuid());
}

}  // namespace ds
