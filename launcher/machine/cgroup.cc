#include "launcher/machine/cgroup.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/text.h"

namespace ds::launcher {
namespace {

bool holds_controller(std::string_view controllers, std::string_view controller) {
  for (size_t begin = 0; begin <= controllers.size();) {
    const size_t end = std::min(controllers.find(',', begin), controllers.size());
    if (controllers.substr(begin, end - begin) == controller) return true;
    begin = end + 1;
  }
  return false;
}

}  // namespace

std::string cgroup_path(std::string_view proc_cgroup, std::string_view controller) {
  while (!proc_cgroup.empty()) {
    const size_t end = std::min(proc_cgroup.find('\n'), proc_cgroup.size());
    const std::string_view line = proc_cgroup.substr(0, end);
    proc_cgroup.remove_prefix(std::min(end + 1, proc_cgroup.size()));
    const size_t first = line.find(':');
    const size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : holds_controller(controllers, controller)) {
      return std::string(line.substr(second + 1));
    }
  }
  return "";
}

std::filesystem::path find_cgroup_file(const std::filesystem::path& root, std::string_view controller,
                                       std::string_view name) {
  auto file = classic_stream<std::ifstream>(root / "proc/self/cgroup");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string group = cgroup_path(text, controller);
  const std::string below = group.empty() ? "" : group.substr(1);
  const std::filesystem::path top = root / "sys/fs/cgroup" / controller;
  std::error_code ignored;
  for (const auto& candidate : {top / below / name, top / name}) {
    if (std::filesystem::exists(candidate, ignored)) return candidate;
  }
  return {};
}

}  // namespace ds::launcher
