// The flags of ds-launch on restarts and elastic training.
#pragma once

#include <string>

#include "launcher/command_line/options.h"

namespace CLI {  // NOLINT(readability-identifier-naming): CLI11's
class App;
}

namespace ds::launcher {

struct RestartFlags {
  int max_restarts = 0, min_nodes = 0, max_nodes = 0;
  bool elastic = false;
};

void declare_restart_flags(CLI::App& app, RestartFlags& raw, Options& options);

// "MIN:MAX", as torchrun's --nnodes takes it, into min_nodes and max_nodes; false: it is no range. Throws ConfigError.
bool take_node_range(const std::string& text, Options& options);

// What the flags mean together. Throws ConfigError.
void take_restarts(const CLI::App& app, const RestartFlags& raw, Options& options);

}  // namespace ds::launcher
