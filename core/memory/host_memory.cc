#include "core/memory/host_memory.h"

#include <malloc.h>

#include <cstdlib>
#include <string_view>

#include "core/log.h"

namespace ds {
namespace {

constexpr const char* kSwitch = "DS_MALLOC_THRESHOLDS";

void set_thresholds(int own_pages, int trim) {
#ifdef __GLIBC__
  const char* const wanted = std::getenv(kSwitch);
  if (wanted != nullptr && std::string_view(wanted) == "0") return;
  for (const char* name : {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"}) {
    if (std::getenv(name) == nullptr) continue;
    log::debug("host memory: ", name, " is set, the allocator's thresholds are left alone");
    return;
  }
  mallopt(M_MMAP_THRESHOLD, own_pages);
  mallopt(M_TRIM_THRESHOLD, trim);
#endif
}

}  // namespace

void keep_freed_host_memory() {
  constexpr int kLargestThreshold = 32 << 20;  // glibc accepts no more
  set_thresholds(kLargestThreshold, 1 << 30);
}

void return_freed_host_memory() { set_thresholds(256 << 10, 256 << 10); }

}  // namespace ds
