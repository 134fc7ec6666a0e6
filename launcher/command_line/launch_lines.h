// Flags as other launchers print them: torchrun's, accelerate's and horovodrun's, beside those that are one of ours by
// another name; both spellings of a flag (--a_b, --a-b); and what Kubeflow leaves in the environment (PET_*).
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/options.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace ds::launcher {

struct LaunchLineFlags {
  int total = 0;
  std::string id, backend, conf, endpoint;
  bool multi_gpu = false;
};

// After the flags that they exclude.
void declare_launch_line_flags(CLI::App& app, LaunchLineFlags& raw);

// The words with each flag in our spelling, up to the program, which is left alone with all that follows it; in front
// of them what `environment` ("NAME=value") says in torchrun's variables and no flag does. `told`: for the user, what
// came from there.
std::vector<std::string> words_as_ours(const CLI::App& app, const std::vector<std::string>& words,
                                       const std::vector<std::string>& environment, std::string& told);

// What the flags mean together; after those for hosts. Throws ConfigError.
void take_launch_lines(const CLI::App& app, const LaunchLineFlags& raw, Options& options);

// Counts that depend on the machine and on whether there are hosts, as num_procs. `has_hosts`: a hostfile or a list.
// Throws ConfigError.
void settle_counts(Options& options, bool has_hosts, int gpus, int cores);

}  // namespace ds::launcher
