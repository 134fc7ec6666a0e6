#include "launcher/program/own_program.h"

#include <filesystem>

#include "core/check.h"
#include "launcher/program/file_hash.h"

namespace ds::launcher {

OwnProgram find_own_program() {
  constexpr const char* kLink = "/proc/self/exe";
  std::error_code error;
  const std::filesystem::path path = std::filesystem::read_symlink(kLink, error);
  if (error) throw IoError(cat("reading ", kLink, ": ", error.message()));
  return {.path = path, .hash = file_hash(kLink)};  // of what runs, whatever has that name by now
}

}  // namespace ds::launcher
