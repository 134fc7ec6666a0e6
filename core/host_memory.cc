#include "core/host_memory.h"

#include <malloc.h>

#include <cstdlib>

#include "core/log.h"

namespace ds {

void keep_freed_host_memory() {
#ifdef __GLIBC__
  static const bool done = [] {
    for (const char* name : {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"}) {
      if (std::getenv(name) != nullptr) {
        log::debug("host memory: ", name, " is set, the allocator's thresholds are left alone");
        return true;
      }
    }
    constexpr int kLargestThreshold = 32 << 20;  // glibc accepts no more
    constexpr int kTrim = 1 << 30;
    mallopt(M_MMAP_THRESHOLD, kLargestThreshold);
    mallopt(M_TRIM_THRESHOLD, kTrim);
    return true;
  }();
  (void)done;
#endif
}

}  // namespace ds
