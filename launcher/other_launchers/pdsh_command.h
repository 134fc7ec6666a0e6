// The command line of pdsh that starts a ds-launch on each host. Pure.
#pragma once

#include "launcher/other_launchers/tool_command.h"

namespace ds::launcher {

// Throws ConfigError when there are no hosts.
ToolCommand pdsh_command(const Options& options, const ToolSetting& setting);

}  // namespace ds::launcher
