// The cores that a rank may use. Splitting is pure; reading the machine is apart from it.
#pragma once

#include <filesystem>
#include <vector>

namespace ds::launcher {

// One logical CPU and where it sits.
struct Core {
  int cpu = 0;      // the number that the kernel gives it
  int node = 0;     // NUMA node
  int package = 0;  // socket
  int core = 0;     // physical core inside the package; hyper-threads share it
};

// One logical CPU of each physical core, in the order node, package, core.
std::vector<Core> physical_cores(std::vector<Core> cores);

// Shares cores out evenly: each rank gets a contiguous run of floor(cores / ranks) in the order node, package, core;
// runs are spread so that ranks fill NUMA nodes equally. Physical cores when there is at least one for each rank, else
// hyper-threads too. Throws ConfigError when there are fewer logical CPUs than ranks.
std::vector<std::vector<int>> split_cores(const std::vector<Core>& cores, int ranks);

// Shares out a list of cores given by the user: its order is kept and every entry counts as a core. Throws ConfigError
// naming cores outside `allowed`.
std::vector<std::vector<int>> split_core_list(const std::vector<int>& list, const std::vector<Core>& allowed,
                                              int ranks);

// The logical CPUs this process may run on (affinity mask, which a cgroup cpuset narrows), with their places as
// `system` (/sys/devices/system) tells; unknown places are 0 and then each CPU counts as a core of its own.
std::vector<Core> allowed_cores(const std::filesystem::path& system = "/sys/devices/system");

// CPUs' worth of time that a cgroup quota leaves to this process, rounded up, at least 1; 0 when there is no quota.
// `root` is prepended to the files read (/proc/self/cgroup, /sys/fs/cgroup/...).
int cpu_quota(const std::filesystem::path& root = "/");

}  // namespace ds::launcher
