// How ds-launch and a training program agree on a new start, for hosts that are to be taken in.
//
// ds-launch names a file in the environment of its ranks and makes it when it would like to start them again. A program
// that finds it after a checkpoint ends with the exit code below on all ranks, which then is no failure.
#pragma once

namespace ds {

inline constexpr const char* kRestartFileVariable = "DS_RESTART_FILE";
inline constexpr int kRestartExitCode = 75;  // EX_TEMPFAIL: try again

}  // namespace ds
