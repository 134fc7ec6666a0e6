#include "comm/meeting/environment_reader.h"

#include <charconv>
#include <cstdlib>

#include "core/check.h"

namespace ds::comm {

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

int parse_integer(const std::string& text, const std::string& where) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require<ConfigError>(error == std::errc() && end == text.data() + text.size(), where,
                       ": expected an integer, found '", text, "'");
  return value;
}

std::optional<int> integer_variable(const EnvironmentReader& environment, const char* name) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  return parse_integer(*text, cat("environment variable ", name));
}

}  // namespace ds::comm
