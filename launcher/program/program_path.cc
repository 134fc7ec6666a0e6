#include "launcher/program/program_path.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ds::launcher {
namespace {

constexpr int kNotFound = 127;
constexpr int kCannotRun = 126;

bool is_file(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_directory(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool can_run(const std::string& path) { return is_file(path) && access(path.c_str(), X_OK) == 0; }

std::string python_hint(const std::string& program) {
  if (!program.ends_with(".py")) return "";
  return cat(": ds-launch runs programs, and this looks like a Python script; write ds-launch ... python3 ", program);
}

std::string find_in_path(const std::string& program, const std::string& path) {
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = end == begin ? "." : path.substr(begin, end - begin);
    if (const std::string candidate = cat(folder, "/", program); can_run(candidate)) return candidate;
    begin = end + 1;
  }
  return "";
}

}  // namespace

std::string find_program(const std::string& program, const std::string& path) {
  if (program.find('/') == std::string::npos) {
    if (const std::string found = find_in_path(program, path); !program.empty() && !found.empty()) return found;
    const std::string here = is_file(program) && python_hint(program).empty()
                                 ? cat("; there is one in this folder: write ./", program)
                                 : python_hint(program);
    throw ProgramError(kNotFound, cat("program '", program, "' was not found in PATH", here));
  }
  if (can_run(program)) return program;
  if (is_directory(program)) throw ProgramError(kCannotRun, cat("program '", program, "' is a folder"));
  if (is_file(program)) {
    const std::string hint = python_hint(program);
    throw ProgramError(kCannotRun, cat("program '", program, "' is not executable",
                                       hint.empty() ? cat("; allow it with chmod +x ", program) : hint));
  }
  const int error = access(program.c_str(), F_OK) == 0 ? 0 : errno;
  throw ProgramError(error == EACCES ? kCannotRun : kNotFound,
                     cat("program '", program, "' was not found: ",
                         error == 0 ? "it is not a regular file" : std::strerror(error), python_hint(program)));
}

ProgramError exec_error(const std::string& file, int error) {
  switch (error) {
    case ENOEXEC:
      return {kCannotRun,
              cat("program '", file, "' cannot be run: not a binary for this machine and not a script with ",
                  "a #! line", python_hint(file))};
    case ENOENT:
      return {kCannotRun,
              cat("program '", file, "' cannot be run: the interpreter in its #! line, or the loader it was ",
                  "linked for, does not exist")};
    case E2BIG:
      return {kCannotRun, cat("program '", file, "' cannot be run: its arguments and environment are too long")};
    default:
      return {kCannotRun, cat("program '", file, "' cannot be run: ", std::strerror(error))};
  }
}

}  // namespace ds::launcher
