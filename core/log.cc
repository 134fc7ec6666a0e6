#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

#include "core/check.h"

namespace ds::log {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::kTrace:
      return spdlog::level::trace;
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarning:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

spdlog::level::level_enum parse_level(const std::string& name) {
  const auto level = spdlog::level::from_str(name);
  require<ConfigError>(level != spdlog::level::off || name == "off", "log level: expected one of trace, debug, info, ",
                       "warning, error, critical, off; found \"", name, "\"");
  return level;
}

spdlog::logger& logger() {
  // Leaked on purpose: destructors of static objects may still log.
  static auto* instance = [] {
    auto* made = new std::shared_ptr<spdlog::logger>(spdlog::stderr_color_mt("dsengine"));
    (*made)->set_pattern("[%H:%M:%S] [%^%l%$] %v");
    if (const char* level = std::getenv("DS_LOG_LEVEL")) (*made)->set_level(parse_level(level));
    return made;
  }();
  return **instance;
}

}  // namespace

void set_rank(int rank, int world_size) {
  if (world_size > 1) logger().set_pattern(cat("[%H:%M:%S] [rank ", rank, "] [%^%l%$] %v"));
  if (std::getenv("DS_LOG_LEVEL") == nullptr) {
    logger().set_level(rank == 0 ? spdlog::level::info : spdlog::level::warn);
  }
}

void set_level(const std::string& name) { logger().set_level(parse_level(name)); }

bool enabled(Level level) { return logger().should_log(to_spdlog(level)); }

void write(Level level, const std::string& text) { logger().log(to_spdlog(level), spdlog::string_view_t(text)); }

}  // namespace ds::log
