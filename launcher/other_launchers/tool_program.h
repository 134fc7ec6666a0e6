// Finding the program behind a --launcher.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/launcher_choice.h"

namespace ds::launcher {

// The first in PATH of the names that it may have. An mpirun is asked for its version, because every MPI has one.
// Throws UsageError naming the Debian package, and what in PATH is of another MPI.
std::string find_tool(Launcher launcher, const std::vector<std::string>& environment);

// Does this text, which `mpirun --version` says, come from the mpirun that `launcher` needs? Pure.
bool is_version_of(Launcher launcher, const std::string& text);

}  // namespace ds::launcher
