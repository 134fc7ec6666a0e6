// Limits of the process, the container and the kernel that a training can run into.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "tools/report/section.h"

namespace ds::tool::report {

// Soft and hard limit; absent: unlimited.
struct ProcessLimit {
  std::optional<int64_t> soft, hard;
};

struct FileSystemRoom {
  bool there = false;
  int64_t bytes = 0, free_bytes = 0;
};

struct MemoryFacts {
  int64_t total = 0, available = 0, swap_total = 0, swap_free = 0;  // /proc/meminfo
  std::optional<int64_t> cgroup_limit;
  int64_t takeable = 0;        // bytes that offload may still take (offload/host_budget.h)
  std::string takeable_limit;  // the limit that decides this
};

struct Limits {
  ProcessLimit locked_memory, open_files, core_file, stack, processes;
  FileSystemRoom shm;  // /dev/shm
  MemoryFacts memory;
  std::string huge_pages;                 // "always", "madvise" or "never"; empty: the kernel does not say
  std::optional<int64_t> ptrace_scope;    // of Yama; absent: no Yama
  std::optional<int64_t> uring_disabled;  // sysctl kernel.io_uring_disabled; absent before Linux 6.6
  std::string uring_refusal;              // why a ring could not be set up; empty: it could
  std::optional<int64_t> overcommit;      // vm.overcommit_memory
  bool infiniband = false;                // an RDMA device is there
  bool container = false;                 // the process runs in a container, as far as it can tell
};

// Parses the limit `name` in the text of /proc/self/limits: "Max open files            20000                20000
// files". Pure.
ProcessLimit parse_limit(std::string_view limits, std::string_view name);
// The word in brackets of "always [madvise] never". Pure.
std::string chosen_word(std::string_view text);

// Reads all limits from the files below `root`, and tries to set up an io_uring.
Limits read_limits(const std::filesystem::path& root = "/");
Section describe(const Limits& limits);

}  // namespace ds::tool::report
