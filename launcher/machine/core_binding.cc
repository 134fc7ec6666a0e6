#include "launcher/machine/core_binding.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "core/check.h"
#include "core/system_call.h"
#include "core/text.h"
#include "launcher/command_line/core_list.h"
#include "launcher/machine/cgroup.h"

namespace ds::launcher {
namespace {

auto place(const Core& core) { return std::make_tuple(core.node, core.package, core.core); }

void sort_by_place(std::vector<Core>& cores) {
  std::sort(cores.begin(), cores.end(), [](const Core& a, const Core& b) {
    return std::make_pair(place(a), a.cpu) < std::make_pair(place(b), b.cpu);
  });
}

// Rank r of n gets [floor(r * count / n), + floor(count / n)).
std::vector<std::vector<int>> even_runs(const std::vector<int>& cpus, int ranks) {
  const size_t count = cpus.size(), n = static_cast<size_t>(ranks);
  std::vector<std::vector<int>> runs;
  for (size_t rank = 0; rank < n; ++rank) {
    const auto first = cpus.begin() + static_cast<std::ptrdiff_t>(rank * count / n);
    runs.emplace_back(first, first + static_cast<std::ptrdiff_t>(count / n));
  }
  return runs;
}

std::vector<int> cpu_numbers(const std::vector<Core>& cores) {
  std::vector<int> cpus;
  for (const Core& core : cores) cpus.push_back(core.cpu);
  return cpus;
}

int read_int(const std::filesystem::path& path, int otherwise) {
  auto file = classic_stream<std::ifstream>(path);
  int value = otherwise;
  return file >> value ? value : otherwise;
}

// CPU -> NUMA node, from node*/cpulist; empty when the machine does not tell.
std::map<int, int> read_nodes(const std::filesystem::path& system) {
  std::map<int, int> node_of;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(system / "node", ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("node") || name.find_first_not_of("0123456789", 4) != std::string::npos) continue;
    auto file = classic_stream<std::ifstream>(entry.path() / "cpulist");
    std::string list;
    if (!(file >> list)) continue;  // a node with memory and no CPU
    for (int cpu : parse_core_list(list)) node_of[cpu] = std::stoi(name.substr(4));
  }
  return node_of;
}

std::vector<int> affinity_mask() {
  for (int size = 1024; size <= 1 << 20; size *= 2) {  // the kernel refuses a mask smaller than its own
    std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(size), [](cpu_set_t* s) { CPU_FREE(s); });
    const size_t bytes = CPU_ALLOC_SIZE(size);
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) == 0) {
      std::vector<int> cpus;
      for (int cpu = 0; cpu < size; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, set.get())) cpus.push_back(cpu);
      }
      return cpus;
    }
    require_system(errno == EINVAL, "sched_getaffinity");
  }
  throw UsageError("sched_getaffinity: the kernel's CPU mask is larger than expected");
}

}  // namespace

std::vector<Core> physical_cores(std::vector<Core> cores) {
  sort_by_place(cores);
  const auto same = [](const Core& a, const Core& b) { return place(a) == place(b); };
  cores.erase(std::unique(cores.begin(), cores.end(), same), cores.end());
  return cores;
}

std::vector<std::vector<int>> split_cores(const std::vector<Core>& cores, int ranks) {
  const std::vector<int> numbers = cpu_numbers(cores);
  require<ConfigError>(cores.size() >= static_cast<size_t>(ranks), "--bind_cores_to_rank: ", ranks,
                       " ranks need a core each, and this process may use only ", cores.size(), " (",
                       CoreRanges{numbers}, "); start fewer ranks or leave the flag out");
  std::vector<Core> usable = physical_cores(cores);
  if (usable.size() < static_cast<size_t>(ranks)) {
    usable = cores;
    sort_by_place(usable);
  }
  return even_runs(cpu_numbers(usable), ranks);
}

std::vector<std::vector<int>> split_core_list(const std::vector<int>& list, const std::vector<Core>& allowed,
                                              int ranks) {
  const std::vector<int> usable = cpu_numbers(allowed);
  for (int cpu : list) {
    require<ConfigError>(std::find(usable.begin(), usable.end(), cpu) != usable.end(), "--bind_core_list: core ", cpu,
                         " is not among the cores that this process may use (", CoreRanges{usable}, ")");
  }
  require<ConfigError>(list.size() >= static_cast<size_t>(ranks), "--bind_core_list: ", ranks,
                       " ranks need a core each, and the list has ", list.size(), " (", CoreRanges{list},
                       "); name more cores or start fewer ranks");
  return even_runs(list, ranks);
}

std::vector<Core> allowed_cores(const std::filesystem::path& system) {
  const std::map<int, int> node_of = read_nodes(system);
  std::vector<Core> cores;
  for (int cpu : affinity_mask()) {
    const auto topology = system / "cpu" / cat("cpu", cpu) / "topology";
    const auto node = node_of.find(cpu);
    cores.push_back({.cpu = cpu,
                     .node = node == node_of.end() ? 0 : node->second,
                     .package = std::max(0, read_int(topology / "physical_package_id", 0)),
                     .core = read_int(topology / "core_id", cpu)});
  }
  sort_by_place(cores);
  return cores;
}

int cpu_quota(const std::filesystem::path& root) {
  double quota = 0, period = 0;
  if (auto file = classic_stream<std::ifstream>(find_cgroup_file(root, "", "cpu.max")); file >> quota >> period) {
    return quota > 0 && period > 0 ? std::max(1, static_cast<int>(std::ceil(quota / period))) : 0;
  }
  auto quota_file = classic_stream<std::ifstream>(find_cgroup_file(root, "cpu", "cpu.cfs_quota_us"));
  auto period_file = classic_stream<std::ifstream>(find_cgroup_file(root, "cpu", "cpu.cfs_period_us"));
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) {
    return std::max(1, static_cast<int>(std::ceil(quota / period)));
  }
  return 0;
}

}  // namespace ds::launcher
