#include "launcher/ranks/flight_line.h"

#include <filesystem>

#include "core/flight_job.h"
#include "core/text.h"
#include "launcher/command_line/shell_words.h"
#include "launcher/program/rank_environment.h"

namespace ds::launcher {
namespace fs = std::filesystem;

std::string flight_folder(const std::vector<std::string>& environment) {
  const auto variable = [&](const char* name) { return environment_value(environment, name); };
  return fs::path(flight_base(variable)) / variable(kFlightJobVariable).value_or("");
}

std::vector<std::string> flight_lines(const std::string& folder, const std::string& host) {
  std::error_code error;  // none there, or not ours
  if (fs::directory_iterator(folder, error) == fs::directory_iterator()) return {};
  return {
      cat("what the ranks", host.empty() ? "" : cat(" on ", host), " did last: ds-tool explain ", shell_word(folder))};
}

}  // namespace ds::launcher
