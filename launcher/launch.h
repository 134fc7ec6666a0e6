// From options to exit code: what ds-launch does, in order.
#pragma once

#include <string>
#include <vector>

namespace ds::launcher {

// `words` are argv[1...], `environment` the inherited one. Returns the exit code: that of the first failed rank, 128 +
// signal, 255 when a host was lost, 127 or 126 when the program was not found or cannot be run, 2 for a wrong command
// line or setting.
int launch(const std::vector<std::string>& words, const std::vector<std::string>& environment);

}  // namespace ds::launcher
