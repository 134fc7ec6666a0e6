// The command lines of ds-tool and of the programs beside it.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <ostream>
#include <sstream>

#include "core/shown_text.h"
#include "core/text.h"

namespace ds::tool {

inline constexpr int kUsageError = 2;  // the exit code for a wrong command line

// Parses the command line. Returns an exit code when there is nothing left to do: 0 after --help or --version, whose
// answer goes to `out`, or kUsageError after a message to `err`.
inline std::optional<int> parse_command_line(CLI::App& app, int argc, const char* const* argv, std::ostream& out,
                                             std::ostream& err) {
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    auto text = classic_stream<std::ostringstream>();
    const int code = app.exit(error, out, text);
    err << shown_message(text.str());
    return code == 0 ? 0 : kUsageError;
  }
}

}  // namespace ds::tool
