// An environment for tests, and the error that it causes.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "comm/meeting/environment_reader.h"
#include "core/check.h"
#include "tests/support/thrown.h"

namespace ds::comm {

using Variables = std::map<std::string, std::string>;

inline EnvironmentReader reader_of(const Variables& variables) {
  return [variables](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

// `base` with `changes` over it; an empty value unsets.
inline Variables changed(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) {
    base[name] = value;
    if (value.empty()) base.erase(name);
  }
  return base;
}

inline std::string config_error_of(const std::function<void()>& call) { return test::thrown_by<ConfigError>(call); }

}  // namespace ds::comm
