// ds-launch on one of many hosts, started through ssh by the first one with the flag --serve_node.
//
// It hears on standard input what to run (see message.h), looks whether it can, runs the ranks when told so, and ends
// them when that connection is gone.
#pragma once

#include <string>
#include <vector>

namespace ds::launcher {

// Serves the first ds-launch to the end. `environment`: the inherited one. Returns the exit code, which nobody but a
// shell reads.
int serve_node(const std::vector<std::string>& environment);

}  // namespace ds::launcher
