#include "tools/report/limits.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "core/check.h"
#include "core/text.h"
#include "launcher/machine/cgroup.h"
#include "offload/host_budget.h"
#include "offload/io_ring.h"
#include "tools/report/kernel_text.h"

namespace ds::tool::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using offload::size_text;

constexpr int64_t kNoLimit = int64_t{1} << 62;  // cgroup v1 writes a number near 2^63

FileSystemRoom room_of(const fs::path& folder) {
  struct statvfs facts {};
  if (::statvfs(folder.c_str(), &facts) != 0) return {};
  const auto block = static_cast<int64_t>(facts.f_frsize);
  return {.there = true,
          .bytes = static_cast<int64_t>(facts.f_blocks) * block,
          .free_bytes = static_cast<int64_t>(facts.f_bavail) * block};
}

std::optional<int64_t> cgroup_memory_limit(const fs::path& root) {
  for (const auto& [controller, name] : {std::pair("", "memory.max"), std::pair("memory", "memory.limit_in_bytes")}) {
    const fs::path file = launcher::find_cgroup_file(root, controller, name);
    const auto limit = file.empty() ? std::nullopt : number_of(file);
    if (limit && *limit < kNoLimit) return limit;
  }
  return std::nullopt;
}

MemoryFacts read_memory(const fs::path& root) {
  const std::string text = text_of(root / "proc/meminfo");
  const auto bytes = [&](const char* name) { return number_field(text, name).value_or(0) * 1024; };
  MemoryFacts memory{.total = bytes("MemTotal"),
                     .available = bytes("MemAvailable"),
                     .swap_total = bytes("SwapTotal"),
                     .swap_free = bytes("SwapFree"),
                     .cgroup_limit = cgroup_memory_limit(root)};
  const std::vector<offload::MemoryRoom> rooms = offload::host_memory_room(root).of_host;
  const auto least =
      std::min_element(rooms.begin(), rooms.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  if (least != rooms.end()) {
    memory.takeable = least->bytes;
    memory.takeable_limit = least->limit;
  }
  return memory;
}

// A real ring says more than the sysctl: seccomp filters of containers refuse it too.
std::string refusal_of_a_ring() {
  try {
    const offload::IoRing ring(-1, 1, "io_uring");
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

bool in_container(const fs::path& root) {
  std::error_code ignored;
  return fs::exists(root / ".dockerenv", ignored) || fs::exists(root / "run/.containerenv", ignored) ||
         fs::exists(root / "var/run/secrets/kubernetes.io", ignored);
}

ordered_json number_or_null(const std::optional<int64_t>& value) {
  return value ? ordered_json(*value) : ordered_json();
}

std::string in_words(const std::optional<int64_t>& value, bool bytes) {
  if (!value) return "unlimited";
  if (*value == 0) return "0";
  return bytes ? size_text(*value) : cat(*value);
}

void add_limit(Section& section, const char* name, const ProcessLimit& limit, bool bytes) {
  section.add(
      name, {{"soft", number_or_null(limit.soft)}, {"hard", number_or_null(limit.hard)}},
      cat(in_words(limit.soft, bytes), limit.soft == limit.hard ? "" : cat(", hard ", in_words(limit.hard, bytes))));
}

void add_memory(Section& section, const MemoryFacts& memory) {
  section.add("memory", {{"bytes", memory.total}, {"available", memory.available}},
              cat(size_text(memory.total), ", ", size_text(memory.available), " available"));
  section.add("cgroup_memory", number_or_null(memory.cgroup_limit), in_words(memory.cgroup_limit, true));
  section.add("for_offload", {{"bytes", memory.takeable}, {"limit", memory.takeable_limit}},
              cat(size_text(memory.takeable), ", by ", memory.takeable_limit));
  section.add(
      "swap", {{"bytes", memory.swap_total}, {"free", memory.swap_free}},
      memory.swap_total == 0 ? "none" : cat(size_text(memory.swap_total), ", ", size_text(memory.swap_free), " free"));
}

void add_kernel_settings(Section& section, const Limits& limits) {
  section.add("overcommit", number_or_null(limits.overcommit),
              !limits.overcommit        ? "unknown"
              : *limits.overcommit == 2 ? "2: never beyond CommitLimit"
                                        : cat(*limits.overcommit));
  section.add_text("huge_pages", limits.huge_pages, "the kernel does not say");
  section.add("ptrace_scope", number_or_null(limits.ptrace_scope),
              limits.ptrace_scope ? cat(*limits.ptrace_scope) : "no Yama: as users and capabilities allow");
  const std::string sysctl = limits.uring_disabled ? cat(*limits.uring_disabled) : "absent";
  section.add("io_uring",
              {{"works", limits.uring_refusal.empty()},
               {"io_uring_disabled", number_or_null(limits.uring_disabled)},
               {"refusal", limits.uring_refusal.empty() ? ordered_json() : ordered_json(limits.uring_refusal)}},
              cat(limits.uring_refusal.empty() ? "works" : "refused", " (sysctl io_uring_disabled: ", sysctl, ")"));
}

}  // namespace

ProcessLimit parse_limit(std::string_view limits, std::string_view name) {
  const size_t begin = limits.find(name);
  ProcessLimit limit;
  if (begin == std::string_view::npos) return limit;
  const std::string_view line = limits.substr(begin + name.size());
  auto words = classic_stream<std::istringstream>(std::string(line.substr(0, line.find('\n'))));
  std::string soft;
  std::string hard;
  words >> soft >> hard;
  limit.soft = leading_number(soft);
  limit.hard = leading_number(hard);
  return limit;
}

std::string chosen_word(std::string_view text) {
  const size_t begin = text.find('[');
  const size_t end = text.find(']', begin == std::string_view::npos ? text.size() : begin);
  return end == std::string_view::npos ? "" : std::string(text.substr(begin + 1, end - begin - 1));
}

Limits read_limits(const fs::path& root) {
  const std::string limits = text_of(root / "proc/self/limits");
  std::error_code ignored;
  const fs::path rdma = root / "sys/class/infiniband";
  return {.locked_memory = parse_limit(limits, "Max locked memory"),
          .open_files = parse_limit(limits, "Max open files"),
          .core_file = parse_limit(limits, "Max core file size"),
          .stack = parse_limit(limits, "Max stack size"),
          .processes = parse_limit(limits, "Max processes"),
          .shm = room_of(root / "dev/shm"),
          .memory = read_memory(root),
          .huge_pages = chosen_word(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
          .ptrace_scope = number_of(root / "proc/sys/kernel/yama/ptrace_scope"),
          .uring_disabled = number_of(root / "proc/sys/kernel/io_uring_disabled"),
          .uring_refusal = refusal_of_a_ring(),
          .overcommit = number_of(root / "proc/sys/vm/overcommit_memory"),
          .infiniband = fs::exists(rdma, ignored) && !fs::is_empty(rdma, ignored),
          .container = in_container(root)};
}

Section describe(const Limits& limits) {
  Section section("limits");
  add_limit(section, "memlock", limits.locked_memory, true);
  add_limit(section, "open_files", limits.open_files, false);
  add_limit(section, "core_file", limits.core_file, true);
  add_limit(section, "stack", limits.stack, true);
  add_limit(section, "processes", limits.processes, false);
  section.add(
      "dev_shm",
      limits.shm.there ? ordered_json{{"bytes", limits.shm.bytes}, {"free", limits.shm.free_bytes}} : ordered_json(),
      limits.shm.there ? cat(size_text(limits.shm.bytes), ", ", size_text(limits.shm.free_bytes), " free")
                       : "not there");
  add_memory(section, limits.memory);
  add_kernel_settings(section, limits);
  section.add("container", limits.container, limits.container ? "yes" : "no sign of one");
  return section;
}

}  // namespace ds::tool::report
