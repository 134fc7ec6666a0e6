// How much host memory this process can still take, asked before it is taken: beyond it the kernel kills instead of
// reporting. Torch-free.
//
// Limits that all ranks of a host share: MemAvailable of /proc/meminfo, CommitLimit where overcommit is off, and the
// memory controllers of cgroup v2 and v1 of this process and of all groups above it (of v2 the smaller of memory.max
// and memory.high, beyond which processes are held up). A group's file pages count as free, the kernel drops them
// before it kills. 1/64 of each, at most 512 MiB, stays free for what else a step needs. Limits of a process: RLIMIT_AS
// and RLIMIT_DATA. RLIMIT_MEMLOCK is not among them: neither plain pages nor those that the CUDA driver pins count
// against it. Swap is not counted, a step that swaps is no step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ds::offload {

// The bytes that one limit still allows.
struct MemoryRoom {
  int64_t bytes = 0;  // never negative
  std::string limit;  // "MemAvailable of /proc/meminfo"
};

struct HostMemoryRoom {
  std::vector<MemoryRoom> of_host;     // for all ranks of the host together
  std::vector<MemoryRoom> of_process;  // for this process
};

// Reads DS_HOST_MEMORY, the memory that a host has for all its ranks, for hosts whose free memory grows as it is used:
// bytes, or a number with KiB, MiB, GiB or TiB. Throws ConfigError for other text.
int64_t host_memory_given(const std::string& text);

// Finds the limits. Where DS_HOST_MEMORY is set it takes the place of all limits of the host.
//
// Reads the kernel's files below `root` (proc/..., and the cgroup folders that proc/self/mountinfo names). What is not
// there, not readable or unlimited is left out.
HostMemoryRoom host_memory_room(const std::filesystem::path& root = "/");

// The memory that is about to be taken.
struct HostMemoryNeed {
  int64_t of_process = 0;  // bytes of this rank
  int64_t of_host = 0;     // bytes of all ranks on this host
  int ranks = 1;           // how many ranks these are
};

// Throws ConfigError when there is no room. The text names the bytes, the limit that says so and what to change.
// `purpose_and_key` is what they are for, as "optimizer states (zero_optimization.offload_optimizer)". To be asked on
// every rank before any rank takes its part.
void require_host_memory(const HostMemoryNeed& need, const std::string& purpose_and_key, const HostMemoryRoom& room);
// Throws ConfigError when this process, which alone takes memory on its host, has no room for `bytes`.
void require_host_memory(int64_t bytes, const std::string& purpose_and_key);

// A size in words: "3.1 GiB", "12.0 MiB", "4.0 KiB".
std::string size_text(int64_t bytes);

}  // namespace ds::offload
