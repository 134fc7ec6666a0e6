// Finds the program before anything starts.
#pragma once

#include <string>

#include "core/check.h"

namespace ds::launcher {

// Says that the program cannot be run. exit_code() is the shells' 127 (not found) or 126 (found, but cannot be run).
class ProgramError : public Error {
 public:
  ProgramError(int exit_code, const std::string& text) : Error(text), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

// The file that `program` names: itself when it has a slash, else the first match in `path` (a PATH value). Throws
// ProgramError that names it and says what to type; a Python script that is not executable gets a hint of its own.
std::string find_program(const std::string& program, const std::string& path);

// The error for a program that the kernel refused to start (errno of execve).
ProgramError exec_error(const std::string& file, int error);

}  // namespace ds::launcher
