#include "comm/meeting/debug_level.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "core/check.h"
#include "core/shown_text.h"

namespace ds::comm {

DebugLevel debug_level(const EnvironmentReader& environment) {
  const auto found = environment("TORCH_DISTRIBUTED_DEBUG");
  if (!found) return DebugLevel::kOff;
  std::string name = *found;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  if (name == "OFF") return DebugLevel::kOff;
  if (name == "INFO") return DebugLevel::kInfo;
  require<ConfigError>(name == "DETAIL", "environment variable TORCH_DISTRIBUTED_DEBUG: expected OFF, INFO or DETAIL, ",
                       "found ", shown_text(*found));
  return DebugLevel::kDetail;
}

}  // namespace ds::comm
