// A job whose ranks are started by another program: pdsh, mpirun or srun.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

// Runs the program that options.launcher means as a child, in a process group of its own, with this process's standard
// output and error. Passes SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and Ctrl-Z on to it. Processes of this
// machine that it leaves behind are ended. It has options.signal_grace_seconds to end after a signal, 5 after
// a second SIGINT, none after a third. Returns its exit code; after a signal 128 + signal. Throws ConfigError for what
// it cannot do, UsageError naming the Debian package when it is not installed.
int run_with_tool(const Options& options, const std::vector<std::string>& environment, Notices& notices);

}  // namespace ds::launcher
