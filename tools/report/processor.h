// The CPUs, and the memory beside them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tools/report/section.h"

namespace ds::tool::report {

struct CpuInfo {
  std::string model;
  int sockets = 0;
  int cores = 0;                          // physical ones
  int threads = 0;                        // logical CPUs
  std::vector<std::string> vector_flags;  // the flags that matter to kernels: avx2, avx512f, amx_bf16, asimd, sve ...
};

struct NumaNode {
  int number = 0;
  std::string cpus;  // "0-15,32-47"
  int64_t bytes = 0, free_bytes = 0;
};

// Parses the text of /proc/cpuinfo, of x86 or Arm. What it does not say is 0 or empty. Pure.
CpuInfo parse_cpuinfo(std::string_view text);
// The nodes in /sys/devices/system/node, in order; empty where the kernel knows none.
std::vector<NumaNode> numa_nodes(const std::filesystem::path& root = "/");

// The best instruction set among those that the vector kernels are compiled for ("AVX3_SPR", "AVX2", "SSE2") and that
// this machine has.
std::string vector_target();
// All instruction sets of the vector kernels that run here, the best first.
std::vector<std::string> vector_targets();

struct Processor {
  CpuInfo info;
  std::vector<NumaNode> nodes;
  std::string allowed;  // CPUs of this process's affinity mask
  int allowed_count = 0;
  int quota = 0;  // CPUs' worth of time, rounded up; 0: no limit
};

Processor read_processor(const std::filesystem::path& root = "/");
Section describe(const Processor& processor);

}  // namespace ds::tool::report
