// A job on many hosts from its first start to its end: it starts again after failures, without hosts that are lost, and
// with those that have come back.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/console.h"
#include "launcher/command_line/host_list.h"
#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

// Runs the job. Returns the exit code of ds-launch and throws what Cluster::run() of the last start does.
int run_on_hosts(const std::vector<Host>& hosts, const Options& options, const std::vector<std::string>& environment,
                 Console& console, Notices& notices);

}  // namespace ds::launcher
