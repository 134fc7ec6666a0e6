#include "comm/meeting/debug_level.h"

#include <string>

#include "core/ascii.h"
#include "core/check.h"
#include "core/shown_text.h"

namespace ds::comm {

DebugLevel debug_level(const EnvironmentReader& environment) {
  const auto found = environment("TORCH_DISTRIBUTED_DEBUG");
  if (!found) return DebugLevel::kOff;
  if (equal_in_any_case(*found, "OFF")) return DebugLevel::kOff;
  if (equal_in_any_case(*found, "INFO")) return DebugLevel::kInfo;
  require<ConfigError>(equal_in_any_case(*found, "DETAIL"),
                       "environment variable TORCH_DISTRIBUTED_DEBUG: expected OFF, INFO or DETAIL, ", "found ",
                       shown_text(*found));
  return DebugLevel::kDetail;
}

}  // namespace ds::comm
