// How a process ended, in words; launcher/processes/rank_processes.cc notices that it did. Pure.
#pragma once

#include <string>

namespace ds::launcher {

// The name and meaning of a signal: "SIGSEGV (segmentation fault: the program touched memory it does not own)".
std::string signal_words(int signal);

// Says how a process ended; `status` as wait4() gives it: "exit code 3", or "killed by " and signal_words(). An exit
// code above 128 also says which signal a shell means by it.
std::string exit_words(int status);

// The exit code of ds-launch itself for that status: the same exit code, or 128 + signal as shells have it.
int exit_code_of(int status);

}  // namespace ds::launcher
