// Starts one rank: fork, set up, exec. Between fork and exec the child calls async-signal-safe functions only.
//
// The rank leads a process group of its own, so that signals reach what it starts too, and asks the kernel for SIGKILL
// when ds-launch dies (PR_SET_PDEATHSIG).
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ds::launcher {

struct RankCommand {
  std::string file;                                   // what find_program() gave
  std::vector<std::string> words;                     // argv, the program as typed first
  std::vector<std::string> environment;               // "NAME=value"
  int stdin_fd = -1, stdout_fd = -1, stderr_fd = -1;  // above 2; owned by the caller
  std::vector<int> cpus;                              // affinity; empty: inherited
  bool hangup_ignored = false;                        // SIGHUP stays ignored, as under nohup
};

// Starts the rank. Returns the pid (which is the process group too) once the program runs. Throws ProgramError when the
// kernel refuses to run it, UsageError when there is no process left to start or the affinity is refused.
pid_t start_rank(const RankCommand& command);

}  // namespace ds::launcher
