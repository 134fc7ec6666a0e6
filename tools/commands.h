// The commands of ds-tool. Each declares its flags in its own file, NAME_command.cc; ds_tool.cc lists them. Torch-free:
// what needs LibTorch is a program of its own beside ds-tool (see ds_tool.cc).
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace ds::tool {

// Does what the command line asks for; returns the exit code.
using Command = std::function<int()>;

// Adds a subcommand with its flags to `app`. When it is the one that is given, parsing sets `chosen`.
using AddCommand = void (*)(CLI::App& app, Command& chosen);

void add_analyze(CLI::App& app, Command& chosen);
void add_check(CLI::App& app, Command& chosen);
void add_explain(CLI::App& app, Command& chosen);
void add_report(CLI::App& app, Command& chosen);
void add_schedule(CLI::App& app, Command& chosen);
void add_simulate(CLI::App& app, Command& chosen);
void add_trace(CLI::App& app, Command& chosen);

}  // namespace ds::tool
