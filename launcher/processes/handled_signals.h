// The signals that a ds-launch with a job takes as events.
#pragma once

#include "core/unique_fd.h"

namespace ds::launcher {

// Does this process ignore SIGHUP, as under nohup?
bool is_hangup_ignored();

// Blocks them and opens a signalfd, which does not block. SIGHUP is not among them when it is ignored.
UniqueFd open_signals(bool hangup_ignored);

}  // namespace ds::launcher
