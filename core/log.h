// Logging (spdlog behind it, not in this header). Torch-free.
//
// Rank 0 logs from `info` up, the other ranks from `warning` up; every line carries a rank prefix when there is more
// than one rank. Level names are spdlog's: trace, debug, info, warning, error, critical, off. Environment DS_LOG_LEVEL
// overrides both. Thread safe.
#pragma once

#include <string>

#include "core/text.h"

namespace ds::log {

enum class Level { kTrace, kDebug, kInfo, kWarning, kError };

// Sets the prefix and the default level of this process. Called by the engine once the rank is known.
void set_rank(int rank, int world_size);

// "debug", "info", ...; throws ConfigError naming the valid levels for anything else.
void set_level(const std::string& name);

bool enabled(Level level);
void write(Level level, const std::string& text);

template <class... Parts>
void debug(const Parts&... parts) {
  if (enabled(Level::kDebug)) write(Level::kDebug, cat(parts...));
}
template <class... Parts>
void info(const Parts&... parts) {
  if (enabled(Level::kInfo)) write(Level::kInfo, cat(parts...));
}
template <class... Parts>
void warning(const Parts&... parts) {
  if (enabled(Level::kWarning)) write(Level::kWarning, cat(parts...));
}
template <class... Parts>
void error(const Parts&... parts) {
  if (enabled(Level::kError)) write(Level::kError, cat(parts...));
}

}  // namespace ds::log
