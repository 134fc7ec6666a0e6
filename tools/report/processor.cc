#include "tools/report/processor.h"

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "core/text.h"
#include "launcher/command_line/core_list.h"
#include "launcher/machine/core_binding.h"
#include "offload/host_budget.h"
#include "tools/report/kernel_text.h"

namespace ds::tool::report {
namespace {

using nlohmann::ordered_json;
using offload::size_text;

constexpr std::array<std::string_view, 17> kVectorFlags = {
    "sse4_2",      "avx",      "f16c",     "fma",      "avx2",  "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "asimd", "asimdhp", "bf16",     "sve"};

// Blocks of /proc/cpuinfo, one for each logical CPU.
std::vector<std::string> blocks_of(std::string_view text) {
  std::vector<std::string> blocks;
  while (!text.empty()) {
    const size_t end = std::min(text.find("\n\n"), text.size());
    if (!field(text.substr(0, end), "processor").empty()) blocks.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 2, text.size()));
  }
  return blocks;
}

std::vector<std::string> vector_flags(const std::string& block) {
  std::string text = field(block, "flags");
  if (text.empty()) text = field(block, "Features");  // Arm's word
  auto words = classic_stream<std::istringstream>(text);
  std::set<std::string> present;
  for (std::string word; words >> word;) present.insert(word);
  std::vector<std::string> found;
  for (const std::string_view flag : kVectorFlags) {
    if (present.contains(std::string(flag))) found.emplace_back(flag);
  }
  return found;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += cat(text.empty() ? "" : " ", word);
  return text;
}

std::string counted(int64_t count, const char* what) { return cat(count, " ", what, count == 1 ? "" : "s"); }

void add_nodes(const Processor& processor, Section& section) {
  ordered_json nodes = ordered_json::array();
  std::vector<std::string> lines;
  for (const NumaNode& node : processor.nodes) {
    nodes.push_back({{"node", node.number}, {"cpus", node.cpus}, {"bytes", node.bytes}, {"free", node.free_bytes}});
    lines.push_back(cat("node ", node.number, ": CPUs ", node.cpus.empty() ? "none" : node.cpus, ", ",
                        size_text(node.bytes), ", ", size_text(node.free_bytes), " free"));
  }
  if (lines.empty()) lines.emplace_back("the kernel names none");
  section.add("numa", nodes, lines);
}

}  // namespace

CpuInfo parse_cpuinfo(std::string_view text) {
  CpuInfo info;
  std::set<std::string> sockets;
  std::set<std::pair<std::string, std::string>> cores;
  for (const std::string& block : blocks_of(text)) {
    if (info.threads++ == 0) {
      info.model = field(block, "model name");
      info.vector_flags = vector_flags(block);
    }
    const std::string socket = field(block, "physical id");
    const std::string core = field(block, "core id");
    if (!socket.empty()) sockets.insert(socket);
    if (!core.empty()) cores.emplace(socket, core);
  }
  info.sockets = static_cast<int>(sockets.size());
  info.cores = static_cast<int>(cores.size());
  return info;
}

std::vector<NumaNode> numa_nodes(const std::filesystem::path& root) {
  std::vector<NumaNode> nodes;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(root / "sys/devices/system/node", ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("node") || name.size() < 5) continue;
    if (name.find_first_not_of("0123456789", 4) != std::string::npos) continue;
    // Lines "Node 0 MemTotal:       24 kB".
    const std::string memory = text_of(entry.path() / "meminfo");
    const std::string start = cat("Node ", name.substr(4), " ");
    nodes.push_back({.number = std::stoi(name.substr(4)),
                     .cpus = text_of(entry.path() / "cpulist"),
                     .bytes = number_field(memory, start + "MemTotal").value_or(0) * 1024,
                     .free_bytes = number_field(memory, start + "MemFree").value_or(0) * 1024});
  }
  std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  return nodes;
}

Processor read_processor(const std::filesystem::path& root) {
  Processor processor;
  processor.info = parse_cpuinfo(text_of(root / "proc/cpuinfo"));
  processor.nodes = numa_nodes(root);
  std::vector<int> allowed;
  for (const launcher::Core& core : launcher::allowed_cores(root / "sys/devices/system")) allowed.push_back(core.cpu);
  std::sort(allowed.begin(), allowed.end());
  processor.allowed = launcher::core_list_text(allowed);
  processor.allowed_count = static_cast<int>(allowed.size());
  processor.quota = launcher::cpu_quota(root);
  return processor;
}

Section describe(const Processor& processor) {
  const CpuInfo& info = processor.info;
  Section section("cpu");
  section.add_text("model", info.model);
  section.add(
      "cores", {{"sockets", info.sockets}, {"physical", info.cores}, {"logical", info.threads}},
      cat(counted(info.sockets, "socket"), ", ", counted(info.cores, "core"), ", ", counted(info.threads, "thread")));
  section.add("allowed", {{"cpus", processor.allowed}, {"count", processor.allowed_count}},
              cat(processor.allowed, " (", processor.allowed_count, ", by the affinity mask)"));
  section.add(
      "quota", processor.quota == 0 ? ordered_json() : ordered_json(processor.quota),
      processor.quota == 0 ? "none" : cat("at most ", counted(processor.quota, "CPU"), ", by the control group"));
  add_nodes(processor, section);
  section.add("vector_kernels", {{"chosen", vector_target()}, {"usable", vector_targets()}},
              cat(vector_target(), " chosen; usable: ", joined(vector_targets())));
  section.add("vector_extensions", info.vector_flags, joined(info.vector_flags));
  return section;
}

}  // namespace ds::tool::report
