// Recognises the kernel's out-of-memory killer: a SIGKILL has no sender's name, but the kernel counts its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace ds::launcher {

// The numbers of kills so far, and the memory limit in bytes; absent where the kernel does not tell.
struct OomCounters {
  std::optional<int64_t> group_kills = {};  // this control group: memory.events (v2) or memory.oom_control (v1)
  std::optional<int64_t> host_kills = {};   // whole machine: /proc/vmstat
  std::optional<int64_t> group_limit = {};  // memory.max (v2) or memory.limit_in_bytes (v1); absent when unlimited
};

// The value after `key` in text of lines "key value", as in memory.events, memory.oom_control and vmstat. Pure.
std::optional<int64_t> counter_value(std::string_view text, std::string_view key);

// Reads the counters. `root` is prepended to the files read.
OomCounters read_oom_counters(const std::filesystem::path& root = "/");

// Says in words what the counters tell about a SIGKILL between two readings; empty when they tell nothing. Pure.
std::string oom_verdict(const OomCounters& before, const OomCounters& after);

// The number as text: "1.5 GiB", "312 MiB". Pure.
std::string bytes_text(int64_t bytes);

}  // namespace ds::launcher
