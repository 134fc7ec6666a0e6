// How ds-launch and a training program agree on a new start, for hosts that are to be taken in.
//
// ds-launch names a file in the environment of its ranks and makes it when it would like to start them again. A program
// that finds it after a checkpoint ends with kRestartExitCode on all ranks, which then is no failure.
#pragma once

#include "dsengine/launch.h"

namespace ds {

inline constexpr const char* kRestartFileVariable = "DS_RESTART_FILE";

}  // namespace ds
