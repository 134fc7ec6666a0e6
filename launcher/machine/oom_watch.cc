#include "launcher/machine/oom_watch.h"

#include <charconv>
#include <fstream>
#include <iterator>

#include "core/text.h"
#include "launcher/machine/cgroup.h"

namespace ds::launcher {
namespace {

constexpr int64_t kUnlimited = int64_t{1} << 60;  // version 1 writes a number near 2^63 for "no limit"

std::string read_text(const std::filesystem::path& path) {
  auto file = classic_stream<std::ifstream>(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<int64_t> read_limit(const std::filesystem::path& path) {
  auto file = classic_stream<std::ifstream>(path);
  int64_t limit = 0;
  if (!(file >> limit) || limit >= kUnlimited) return std::nullopt;  // version 2 writes "max" for "no limit"
  return limit;
}

bool grew(const std::optional<int64_t>& before, const std::optional<int64_t>& after) {
  return before && after && *after > *before;
}

}  // namespace

std::optional<int64_t> counter_value(std::string_view text, std::string_view key) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    if (line.size() <= key.size() || !line.starts_with(key) || line[key.size()] != ' ') continue;
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(line.data() + key.size() + 1, line.data() + line.size(), value);
    if (error == std::errc()) return value;
  }
  return std::nullopt;
}

OomCounters read_oom_counters(const std::filesystem::path& root) {
  OomCounters counters;
  counters.host_kills = counter_value(read_text(root / "proc/vmstat"), "oom_kill");
  if (const auto events = find_cgroup_file(root, "", "memory.events"); !events.empty()) {
    counters.group_kills = counter_value(read_text(events), "oom_kill");
    counters.group_limit = read_limit(find_cgroup_file(root, "", "memory.max"));
  } else if (const auto control = find_cgroup_file(root, "memory", "memory.oom_control"); !control.empty()) {
    counters.group_kills = counter_value(read_text(control), "oom_kill");
    counters.group_limit = read_limit(find_cgroup_file(root, "memory", "memory.limit_in_bytes"));
  }
  return counters;
}

std::string oom_verdict(const OomCounters& before, const OomCounters& after) {
  if (grew(before.group_kills, after.group_kills)) {
    return cat("by the kernel's out-of-memory killer, because the control group reached its memory limit",
               after.group_limit ? cat(" of ", bytes_text(*after.group_limit)) : std::string());
  }
  if (grew(before.host_kills, after.host_kills)) {
    return "by the kernel's out-of-memory killer, because the machine ran out of memory";
  }
  return "";
}

std::string bytes_text(int64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1024.0 * 1024.0);
  return mib < 1024 ? fixed(mib, 0) + " MiB" : fixed(mib / 1024, 1) + " GiB";
}

}  // namespace ds::launcher
