#include "pipeline/schedule/text_file.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "core/system_call.h"

namespace ds::pipeline {

std::string read_text_file(const std::string& path) {
  std::error_code ignored;
  require<IoError>(!std::filesystem::is_directory(path, ignored), path, ": expected a file, found a folder");
  std::ifstream in(path, std::ios::binary);
  require_system<IoError>(in.good(), path, ": cannot be opened");
  std::ostringstream text;
  text << in.rdbuf();
  require_system<IoError>(!text.bad(), path, ": cannot be read");
  return std::move(text).str();
}

}  // namespace ds::pipeline
