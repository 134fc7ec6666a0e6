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

// The exit codes of the command; where nothing could be compared it throws, and ds-launch ends with 2.
inline constexpr int kParityEqual = 0;
inline constexpr int kParityDifferent = 1;

// Starts a job, and returns its exit code.
using RunJob = std::function<int(const Options& options, const std::vector<std::string>& environment)>;

// Runs the command. `words` follow kParityWord. Returns kParityEqual where layout and one rank train the same,
// kParityDifferent where they do not. Throws UsageError, with its exit code, for a run that failed, ConfigError, and
// IoError for records that cannot be read.
int run_parity(const std::vector<std::string>& words, const std::vector<std::string>& environment, Console& console,
               const RunJob& run);

}  // namespace ds::launcher
