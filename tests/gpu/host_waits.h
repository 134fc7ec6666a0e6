// What the host has waited for, as the simulated GPU counts it (DS_CUDA_LIBRARY names its library).
#pragma once

#include <dlfcn.h>

#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "core/text.h"
#include "tests/simulated_gpu/reports.h"

namespace ds::test {

using Waits = std::map<std::string, int64_t>;

// Since the last call, of all ranks of this process.
inline Waits take_waits() {
  static const auto take = reinterpret_cast<decltype(&ds_simulated_gpu_waits)>(
      ::dlsym(::dlopen(std::getenv("DS_CUDA_LIBRARY"), RTLD_NOW), "ds_simulated_gpu_waits"));
  static Waits waits;
  waits.clear();
  take([](const char* what, int64_t times) { waits[what] = times; });
  return waits;
}

// Does so on the first of the ranks that meet at `all`, while none of them goes on. Others leave `waits` as it is.
inline void take_waits(std::barrier<>& all, bool is_first, Waits& waits) {
  all.arrive_and_wait();
  if (is_first) waits = take_waits();
  all.arrive_and_wait();
}

inline std::string text_of(const Waits& waits) {
  std::string text;
  for (const auto& [what, times] : waits) text += cat(times, " times ", what, "\n");
  return text;
}

}  // namespace ds::test
