#include "launcher/flight_line.h"

#include <unistd.h>

#include <filesystem>

#include "core/flight_job.h"
#include "core/text.h"
#include "launcher/rank_environment.h"
#include "launcher/ssh_command.h"

namespace ds::launcher {
namespace {

namespace fs = std::filesystem;

fs::path temporary_folder(const std::vector<std::string>& environment) {
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {  // as std::filesystem::temp_directory_path()
    if (const auto folder = environment_value(environment, name)) return *folder;
  }
  return "/tmp";
}

}  // namespace

std::string flight_folder(const std::vector<std::string>& environment) {
  fs::path base = environment_value(environment, kFlightFolderVariable).value_or("");
  if (base.empty()) base = temporary_folder(environment) / cat(kFlightFolderPrefix, getuid());
  return base / environment_value(environment, kFlightJobVariable).value_or("");
}

std::vector<std::string> flight_lines(const std::string& folder, const std::string& host) {
  std::error_code error;  // none there, or not ours
  if (fs::directory_iterator(folder, error) == fs::directory_iterator()) return {};
  return {
      cat("what the ranks", host.empty() ? "" : cat(" on ", host), " did last: ds-tool explain ", shell_word(folder))};
}

}  // namespace ds::launcher
