// The options of the first ds-launch that the ds-launch of another host gets. Pure.
#pragma once

#include <string>
#include <vector>

#include "launcher/command_line/options.h"

namespace ds::launcher {

// The flags that concern the ranks of a host, whatever host it is; then "--", the program and its arguments.
std::vector<std::string> words_for_ranks(const Options& options);

}  // namespace ds::launcher
