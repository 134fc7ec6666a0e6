// Flags of other launchers, as they print them: those of torchrun, accelerate and horovodrun that are not one of ours
// by another name; both spellings of a flag (--a_b, --a-b); and what Kubeflow leaves in the environment (PET_*).
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

// Declares them. To be called after the flags that they exclude are declared.
void declare_launch_line_flags(CLI::App& app, LaunchLineFlags& raw);

// The words with each flag in our spelling, up to the program, which is left alone with all that follows it. Flags that
// `environment` ("NAME=value") gives in torchrun's variables stand in front, where no word gives them. `told`: a text
// for the user on what came from there.
std::vector<std::string> words_as_ours(const CLI::App& app, const std::vector<std::string>& words,
                                       const std::vector<std::string>& environment, std::string& told);

// Sets the options that these flags mean together. To be called after the flags for hosts are taken. Throws
// ConfigError.
void take_launch_lines(const CLI::App& app, const LaunchLineFlags& raw, Options& options);

// Sets num_procs and other counts that depend on the machine and on whether there are hosts. `has_hosts`: a hostfile or
// a list. Throws ConfigError.
void settle_counts(Options& options, bool has_hosts, int gpus, int cores);

}  // namespace ds::launcher
