#include <hwy/highway.h>

#include <cstdint>

#include "tools/report/processor.h"

namespace ds::tool::report {

// Highway numbers better targets lower, a bit each; HWY_TARGETS are those that the kernels are compiled for, by the
// same flags (tools/CMakeLists.txt).
std::vector<std::string> vector_targets() {
  std::vector<std::string> names;
  const int64_t usable = hwy::SupportedTargets() & static_cast<int64_t>(HWY_TARGETS);
  for (int bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if ((usable & target) != 0) names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

std::string vector_target() {
  const std::vector<std::string> names = vector_targets();
  return names.empty() ? "" : names.front();
}

}  // namespace ds::tool::report
