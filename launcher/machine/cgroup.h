// Finds this process's control-group files, version 2 or 1.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace ds::launcher {

// The path of this process's group in the text of /proc/self/cgroup: `controller` empty means the unified (version 2)
// line "0::/path", else the line whose controllers hold it, as in "4:memory,hugetlb:/path". Empty when absent. Pure.
std::string cgroup_path(std::string_view proc_cgroup, std::string_view controller);

// The file of that name in this process's group, or at the top of the hierarchy where a container shows only that;
// empty when neither exists. `root` is prepended to /proc/self/cgroup and /sys/fs/cgroup.
std::filesystem::path find_cgroup_file(const std::filesystem::path& root, std::string_view controller,
                                       std::string_view name);

}  // namespace ds::launcher
