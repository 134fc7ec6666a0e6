// The command line of ds-launch: DeepSpeed's flags, then the program and its arguments.
//
//   ds-launch [flags] [--] program args...
//
// Flags end at the first word that is not one; everything from the program on is passed to it untouched. Flags that
// DeepSpeed's launcher has and this one has not are refused by name, never ignored.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ds::launcher {

enum class Verbosity { kError, kWarning, kInfo, kDebug };

struct Options {
  std::optional<int> num_procs;     // ranks to start; absent: one for each visible GPU, or 1
  bool count_is_gpus = false;       // the count came as --num_gpus: it may not exceed the visible GPUs
  std::string master_addr;          // empty: 127.0.0.1; else an address of this machine
  std::optional<int> master_port;   // absent: 29500, or a free port when that one is in use
  bool bind_cores = false;          // give each rank its own cores
  std::vector<int> bind_core_list;  // cores to share out; empty: all that this process may use
  std::string rank_log_dir;         // empty: no log files
  Verbosity verbosity = Verbosity::kInfo;
  double failure_grace_seconds = 5;    // from SIGTERM to SIGKILL after a rank failed
  double signal_grace_seconds = 30;    // from a forwarded signal to SIGKILL; 0: no limit
  std::string program;                 // as typed
  std::vector<std::string> arguments;  // of the program

  // Set for --help and --version: what to print on standard output before ending with exit code 0.
  std::optional<std::string> answer;
};

// `words` are argv[1...]. Throws ConfigError that names the flag, what was expected and what to type instead.
Options parse_options(const std::vector<std::string>& words);

}  // namespace ds::launcher
