#include "offload/host_budget.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/text.h"

namespace ds::offload {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPartKept = 64;  // 1/64 of a limit of the host stays free
constexpr int64_t kMostKept = int64_t{512} << 20;
// cgroup v1 says "no limit" by the largest multiple of a page; no host comes near half of it.
constexpr int64_t kNoLimit = int64_t{1} << 62;

int64_t kept_free(int64_t limit) { return std::min(limit / kPartKept, kMostKept); }

std::string text_of(const fs::path& path) {
  auto in = classic_stream<std::ifstream>(path);
  auto text = classic_stream<std::ostringstream>();
  text << in.rdbuf();
  return std::move(text).str();
}

std::vector<std::string> words_of(const std::string& line) {
  auto in = classic_stream<std::istringstream>(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(std::move(word));
  return words;
}

// A number at the start of a text; "max", "unlimited" and nothing are no number.
std::optional<int64_t> number_in(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The number after `name` at the start of a line: "MemAvailable:  24190832 kB", "total_active_file 4096".
std::optional<int64_t> field_of(const std::string& text, const std::string& name) {
  auto in = classic_stream<std::istringstream>(text);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(name)) continue;
    const size_t start = line.find_first_not_of(" \t", name.size());
    return start == name.size() || start == std::string::npos ? std::nullopt : number_in(line.substr(start));
  }
  return std::nullopt;
}

std::optional<int64_t> kib_field(const std::string& text, const std::string& name) {
  const auto value = field_of(text, name);
  return value ? std::optional(*value * 1024) : std::nullopt;
}

void add_room(std::vector<MemoryRoom>& rooms, int64_t bytes, std::string limit) {
  rooms.push_back({std::max<int64_t>(bytes, 0), std::move(limit)});
}

void add_meminfo(const fs::path& root, std::vector<MemoryRoom>& rooms) {
  const std::string text = text_of(root / "proc/meminfo");
  const auto available = kib_field(text, "MemAvailable:");
  const int64_t total = kib_field(text, "MemTotal:").value_or(0);
  if (available) add_room(rooms, *available - kept_free(total), "MemAvailable of /proc/meminfo");
  if (number_in(text_of(root / "proc/sys/vm/overcommit_memory")) != 2) return;
  const auto limit = kib_field(text, "CommitLimit:");
  const auto committed = kib_field(text, "Committed_AS:");
  if (limit && committed)
    add_room(rooms, *limit - *committed - kept_free(*limit),
             "CommitLimit of /proc/meminfo, as vm.overcommit_memory is 2");
}

// The file names of one version of the memory controller.
struct ControllerFiles {
  std::vector<std::string> limits;
  const char* used;
  std::vector<std::string> droppable;  // fields of memory.stat
};

const ControllerFiles kVersion2{{"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};
const ControllerFiles kVersion1{
    {"memory.limit_in_bytes"}, "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

struct GroupLimit {
  int64_t bytes = kNoLimit;
  std::string file;
};

GroupLimit smallest_limit(const fs::path& folder, const ControllerFiles& files) {
  GroupLimit smallest;
  for (const std::string& file : files.limits) {
    const auto bytes = number_in(text_of(folder / file));
    if (bytes && *bytes < smallest.bytes) smallest = {*bytes, file};
  }
  return smallest;
}

void add_group(const fs::path& root, const fs::path& group, const ControllerFiles& files,
               std::vector<MemoryRoom>& rooms) {
  const fs::path folder = root / group.relative_path();
  const GroupLimit limit = smallest_limit(folder, files);
  const auto used = number_in(text_of(folder / files.used));
  if (limit.file.empty() || !used) return;
  const std::string stat = text_of(folder / "memory.stat");
  int64_t droppable = 0;
  for (const std::string& name : files.droppable) droppable += field_of(stat, name).value_or(0);
  add_room(rooms, limit.bytes - kept_free(limit.bytes) - std::max<int64_t>(*used - droppable, 0),
           (group / limit.file).string());
}

struct ControllerMount {
  fs::path group;  // the group that `point` shows
  fs::path point;
};

// Lines of mountinfo: id parent device root point options [tags ...] - type source super-options
std::optional<ControllerMount> find_mount(const std::string& mountinfo, const std::string& type,
                                          const std::string& option) {
  auto in = classic_stream<std::istringstream>(mountinfo);
  for (std::string line; std::getline(in, line);) {
    const auto words = words_of(line);
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 5 || words.end() - dash < 4 || dash[1] != type) continue;
    const std::string options = cat(",", dash[3], ",");
    if (option.empty() || options.find(cat(",", option, ",")) != std::string::npos)
      return ControllerMount{words[3], words[4]};
  }
  return std::nullopt;
}

// Lines of /proc/self/cgroup: number:controllers:path, of version 2 "0::path".
std::optional<fs::path> group_of_this_process(const std::string& cgroup, const std::string& controller) {
  auto in = classic_stream<std::istringstream>(cgroup);
  for (std::string line; std::getline(in, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool found = controller.empty()
                           ? controllers.empty()
                           : cat(",", controllers, ",").find(cat(",", controller, ",")) != std::string::npos;
    if (found) return line.substr(second + 1);
  }
  return std::nullopt;
}

// This process's group and all above it that are visible here. Inside a container the mount may show a part of the
// tree only, or the path may lead out of it: then the mount's own folder is what there is to ask.
void add_cgroups(const fs::path& root, const std::string& type, const std::string& controller,
                 const ControllerFiles& files, std::vector<MemoryRoom>& rooms) {
  const auto mount = find_mount(text_of(root / "proc/self/mountinfo"), type, controller);
  const auto group = group_of_this_process(text_of(root / "proc/self/cgroup"), controller);
  if (!mount || !group) return;
  fs::path below = group->lexically_relative(mount->group);
  if (below.empty() || *below.begin() == "..") below = ".";
  for (; !below.empty() && below != "."; below = below.parent_path())
    add_group(root, mount->point / below, files, rooms);
  add_group(root, mount->point, files, rooms);
}

// A line of /proc/self/limits has the soft limit after the name, or "unlimited".
void add_process_limits(const fs::path& root, std::vector<MemoryRoom>& rooms) {
  const std::string limits = text_of(root / "proc/self/limits");
  const std::string status = text_of(root / "proc/self/status");
  const auto add = [&](const char* name, const char* used_field, const char* limit_text) {
    const auto limit = field_of(limits, name);
    const auto used = kib_field(status, used_field);
    if (limit && used) add_room(rooms, *limit - *used, limit_text);
  };
  add("Max address space", "VmSize:", "RLIMIT_AS (ulimit -v)");
  add("Max data size", "VmData:", "RLIMIT_DATA (ulimit -d)");
}

const MemoryRoom* tightest(const std::vector<MemoryRoom>& rooms) {
  const auto found = std::min_element(rooms.begin(), rooms.end(),
                                      [](const auto& one, const auto& other) { return one.bytes < other.bytes; });
  return found == rooms.end() ? nullptr : &*found;
}

constexpr const char* kGiven = "DS_HOST_MEMORY";

constexpr const char* kAdvice =
    "Offload fewer elements (offload_optimizer.ratio, stage3_param_persistence_threshold), offload to files "
    "(\"device\": "
    "\"nvme\"), raise that limit, or spread the model over more ranks on more hosts. "
    "Where free memory grows as it is used, the environment variable DS_HOST_MEMORY (\"200GiB\") says what a host has";

}  // namespace

int64_t host_memory_given(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  for (const auto& [name, bytes] : {std::pair{"", 1.0}, std::pair{"KiB", 0x1p10}, std::pair{"MiB", 0x1p20},
                                    std::pair{"GiB", 0x1p30}, std::pair{"TiB", 0x1p40}}) {
    if (error != std::errc() || unit != name || !(number * bytes >= 0 && number * bytes < 0x1p60)) continue;
    return static_cast<int64_t>(number * bytes);
  }
  throw ConfigError(
      cat(kGiven, ": expected bytes, or a number with KiB, MiB, GiB or TiB as in 200GiB, found \"", text, "\""));
}

HostMemoryRoom host_memory_room(const fs::path& root) {
  HostMemoryRoom room;
  if (const char* const given = std::getenv(kGiven); given != nullptr && *given != '\0') {
    add_room(room.of_host, host_memory_given(given), kGiven);
    add_process_limits(root, room.of_process);
    return room;
  }
  add_meminfo(root, room.of_host);
  add_cgroups(root, "cgroup2", "", kVersion2, room.of_host);
  add_cgroups(root, "cgroup", "memory", kVersion1, room.of_host);
  add_process_limits(root, room.of_process);
  return room;
}

void require_host_memory(const HostMemoryNeed& need, const std::string& purpose_and_key, const HostMemoryRoom& room) {
  ensure(need.of_process >= 0 && need.of_host >= need.of_process && need.ranks > 0,
         "the ranks of a host need what each of them needs");
  if (const MemoryRoom* host = tightest(room.of_host); host != nullptr && need.of_host > host->bytes) {
    throw ConfigError(cat("host memory for ", purpose_and_key, ": needs ", size_text(need.of_process),
                          " on this rank, ", size_text(need.of_host), " on all ranks of this host (", need.ranks,
                          "), available are ", size_text(host->bytes), " (", host->limit, "). ", kAdvice));
  }
  if (const MemoryRoom* process = tightest(room.of_process); process != nullptr && need.of_process > process->bytes) {
    throw ConfigError(cat("host memory for ", purpose_and_key, ": needs ", size_text(need.of_process),
                          " in this process, available are ", size_text(process->bytes), " (", process->limit, "). ",
                          kAdvice));
  }
}

void require_host_memory(int64_t bytes, const std::string& purpose_and_key) {
  require_host_memory({.of_process = bytes, .of_host = bytes}, purpose_and_key, host_memory_room());
}

std::string size_text(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return cat(fixed(value / (1 << 30), 1), " GiB");
  if (bytes >= int64_t{1} << 20) return cat(fixed(value / (1 << 20), 1), " MiB");
  return cat(fixed(value / 1024, 1), " KiB");
}

}  // namespace ds::offload
