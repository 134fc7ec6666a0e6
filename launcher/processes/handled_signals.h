// The signals that a ds-launch with a job takes as events. Their meaning is in signal_policy.h.
#pragma once

#include <functional>
#include <optional>

#include "core/unique_fd.h"

namespace ds::launcher {

// Whether this process ignores SIGHUP, as under nohup.
bool is_hangup_ignored();

// Blocks those signals and opens a signalfd, which does not block. SIGHUP is not among them when it is ignored.
UniqueFd open_signals(bool hangup_ignored);

// The next signal of open_signals() that has come, without waiting; none when all have been taken.
std::optional<int> next_signal(const UniqueFd& signals);

// Ctrl-Z: sends `stop_signal` to what was started, stops this process, and when that goes on, sends SIGCONT.
void stop_together(int stop_signal, const std::function<void(int number)>& send);

}  // namespace ds::launcher
