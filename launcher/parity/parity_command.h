// `ds-launch parity`: the user's program on the wanted layout and on one rank, and whether both train the same.
//
//   ds-launch parity [flags of ds-launch] [--against CONFIG2] [--steps N] [--folder DIR] [--replay] [--one_order]
//                    CONFIG -- PROGRAM ARGS
//
// The layout runs twice, the second time with its batches in another order, from which the bounds follow: Note [Two
// orders of the same sums].
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "launcher/command_line/console.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

// The first word of such a command line. A program of this name starts as ./parity, or after --.
inline constexpr const char* kParityWord = "parity";

// Starts a job, and returns its exit code.
using RunJob = std::function<int(const Options& options, const std::vector<std::string>& environment)>;

// Runs the command. `words` follow kParityWord. Returns 0 where layout and one rank train the same, 1 where they do
// not, else the exit code of the run that failed. Throws ConfigError, IoError.
int run_parity(const std::vector<std::string>& words, const std::vector<std::string>& environment, Console& console,
               const RunJob& run);

}  // namespace ds::launcher
