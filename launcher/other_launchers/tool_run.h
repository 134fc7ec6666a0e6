// A job whose ranks are started by another program: pdsh, mpirun or srun. Finds that program and runs it.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/launcher_choice.h"
#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

// Runs the program that options.launcher means as a child, in a process group of its own, with this process's standard
// output and error. Passes SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and Ctrl-Z on to it. Processes of this
// machine that it leaves behind are ended. It has options.signal_grace_seconds to end after a signal, 5 after
// a second SIGINT, none after a third. Returns its exit code; after a signal 128 + signal. Throws ConfigError for what
// it cannot do, UsageError naming the Debian package when it is not installed.
int run_with_tool(const Options& options, const std::vector<std::string>& environment, Notices& notices);

// The program behind a --launcher: the first in PATH of the names that it may have. An mpirun is asked for its version,
// because every MPI has one. Throws UsageError naming the Debian package, and what in PATH is of another MPI.
std::string find_tool(Launcher launcher, const std::vector<std::string>& environment);

// Whether the text, printed by `mpirun --version`, comes from the mpirun that `launcher` needs. Pure.
bool is_version_of(Launcher launcher, const std::string& text);

}  // namespace ds::launcher
