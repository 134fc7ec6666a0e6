// Reading environment variables, from the process or from a test. Torch-free.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace ds::comm {

// Reads a variable: nullopt where it is not set or empty.
using EnvironmentReader = std::function<std::optional<std::string>(const char* name)>;
std::optional<std::string> process_environment(const char* name);

// Reads an integer. Throws ConfigError that begins with `where` when `text` is not an integer.
int parse_integer(const std::string& text, const std::string& where);

// Reads a variable as an integer. Throws ConfigError naming a variable that is set and is not an integer.
std::optional<int> integer_variable(const EnvironmentReader& environment, const char* name);

}  // namespace ds::comm
