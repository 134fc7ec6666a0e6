// How a process ended, in words. Pure.
#pragma once

#include <string>

namespace ds::launcher {

// "SIGSEGV (segmentation fault: the program touched memory it does not own)".
std::string signal_words(int signal);

// `status` as wait4() gives it: "exit code 3", or "killed by " and signal_words(). An exit code above 128 also says
// which signal a shell means by it.
std::string exit_words(int status);

// What ds-launch itself ends with for that status: the exit code, or 128 + signal as shells do.
int exit_code_of(int status);

}  // namespace ds::launcher
