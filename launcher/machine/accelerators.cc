#include "launcher/machine/accelerators.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/check.h"
#include "core/text.h"

namespace ds::launcher {
namespace {

struct Gpu {
  std::string bus;  // 0000:1b:00.0
  std::string uuid;
  std::string minor;  // 0 of /dev/nvidia0
};

// The value of "GPU UUID: 		 GPU-8932f937-...", in a file with such lines.
std::string value_in(const std::filesystem::path& information, std::string_view key) {
  auto file = classic_stream<std::ifstream>(information);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const size_t begin = line.find_first_not_of(" \t", key.size());
    return begin == std::string::npos ? "" : line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
  }
  return "";
}

std::vector<Gpu> gpus_in(const std::filesystem::path& driver) {
  std::vector<Gpu> gpus;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(driver, ignored)) {
    const std::filesystem::path information = entry.path() / "information";
    gpus.push_back({.bus = entry.path().filename(),
                    .uuid = value_in(information, "GPU UUID:"),
                    .minor = value_in(information, "Device Minor:")});
  }
  std::sort(gpus.begin(), gpus.end(), [](const Gpu& a, const Gpu& b) { return a.bus < b.bus; });
  return gpus;
}

// The kernel asks the control group of devices, too; nothing is opened, which may wake a GPU.
bool all_usable(const std::vector<Gpu>& gpus, const std::filesystem::path& dev) {
  return std::all_of(gpus.begin(), gpus.end(), [&](const Gpu& gpu) {
    return !gpu.minor.empty() && ::access((dev / ("nvidia" + gpu.minor)).c_str(), R_OK | W_OK) == 0;
  });
}

// Whether a name in CUDA_VISIBLE_DEVICES means the GPU, by the rules of CUDA: a number, or the beginning of a uuid that
// no other has.
const Gpu* find(const std::vector<Gpu>& gpus, bool numbered, const std::string& name) {
  size_t number = 0;
  const char* const end = name.data() + name.size();
  if (const auto [rest, error] = std::from_chars(name.data(), end, number); error == std::errc() && rest == end) {
    return numbered && number < gpus.size() ? &gpus[number] : nullptr;
  }
  const auto named = [&](const Gpu& gpu) { return gpu.uuid.starts_with(name); };
  if (name.empty() || std::count_if(gpus.begin(), gpus.end(), named) != 1) return nullptr;
  return &*std::find_if(gpus.begin(), gpus.end(), named);
}

std::optional<int> node_of(const std::filesystem::path& device) {
  int node = -1;  // what the kernel says of a machine that does not tell
  auto file = classic_stream<std::ifstream>(device / "numa_node");
  return file >> node && node >= 0 ? std::optional(node) : std::nullopt;
}

}  // namespace

int count_gpu_devices(const std::filesystem::path& dev) {
  constexpr std::string_view kPrefix = "nvidia";
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(dev, ignored)) {
    const std::string name = entry.path().filename();
    count += name.starts_with(kPrefix) && name.size() > kPrefix.size() &&
             name.find_first_not_of("0123456789", kPrefix.size()) == std::string::npos;
  }
  return count;
}

GpuList visible_gpus(const std::optional<std::string>& cuda_visible_devices, int devices) {
  GpuList gpus;
  if (devices == 0) return gpus;
  if (!cuda_visible_devices) {
    for (int i = 0; i < devices; ++i) gpus.push_back(cat(i));
    return gpus;
  }
  const std::string& text = *cuda_visible_devices;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string name = text.substr(begin, end - begin);
    std::erase(name, ' ');
    if (name.empty() || name == "-1") break;
    gpus.push_back(std::move(name));
    begin = end + 1;
  }
  return gpus;
}

GpuList gpus_of_slots(const GpuList& gpus, const std::vector<int>& slots) {
  GpuList chosen;
  for (int slot : slots) {
    if (gpus.empty()) break;
    require<ConfigError>(slot < static_cast<int>(gpus.size()), "slot ", slot, " has no GPU: ", gpus.size(),
                         " visible here (CUDA_VISIBLE_DEVICES and /dev/nvidia*), slots 0 to ", gpus.size() - 1,
                         "; correct slots= in the hostfile, or name other slots");
    chosen.push_back(gpus[static_cast<size_t>(slot)]);
  }
  return chosen;
}

RankCount choose_rank_count(const std::optional<int>& asked, bool asked_as_gpus, const GpuList& gpus) {
  const int visible = static_cast<int>(gpus.size());
  if (!asked) {
    if (visible > 0) return {.ranks = visible, .note = ""};
    return {.ranks = 1, .note = "no GPU is visible and --num_procs is not given: starting 1 rank"};
  }
  require<ConfigError>(!asked_as_gpus || visible == 0 || *asked <= visible, "--num_gpus ", *asked, ": only ", visible,
                       " visible; ask for fewer, widen CUDA_VISIBLE_DEVICES, or use --num_procs ", *asked,
                       " to let ranks share GPUs");
  if (asked_as_gpus && visible == 0) {
    return {.ranks = *asked, .note = cat("no GPU is visible: --num_gpus ", *asked, " starts ranks for the CPU")};
  }
  if (!asked_as_gpus && visible > 0 && *asked > visible) {
    return {
        .ranks = *asked,
        .note = cat("--num_procs ", *asked, ": where the program uses the GPU", visible == 1 ? "" : "s",
                    ", its ranks share ", visible, visible == 1 ? " GPU" : " GPUs", ", which NCCL refuses: ",
                    visible == 1 ? "they train on it with \"communication_backend\": \"gloo\" only"
                                 : "ranks beyond the GPUs end with an error",
                    ", or on the CPU (CUDA_VISIBLE_DEVICES=\"\"). Without --num_procs there is one rank for each GPU")};
  }
  return {.ranks = *asked, .note = ""};
}

std::optional<std::string> devices_of_ranks(const GpuList& gpus, int ranks) {
  if (gpus.empty()) return std::nullopt;
  std::string text;
  for (size_t i = 0; i < std::min(gpus.size(), static_cast<size_t>(ranks)); ++i) {
    text += (i == 0 ? "" : ",") + gpus[i];
  }
  return text;
}

std::vector<std::optional<int>> nodes_of_gpus(const GpuList& gpus, const std::filesystem::path& driver,
                                              const std::filesystem::path& devices, const std::filesystem::path& dev) {
  const std::vector<Gpu> known = gpus_in(driver);
  const bool numbered = all_usable(known, dev);
  std::vector<std::optional<int>> nodes;
  for (const std::string& name : gpus) {
    const Gpu* const gpu = find(known, numbered, name);
    nodes.push_back(gpu == nullptr ? std::nullopt : node_of(devices / gpu->bus));
  }
  return nodes;
}

std::vector<std::vector<int>> cores_beside_gpus(const std::vector<std::optional<int>>& nodes,
                                                const std::vector<Core>& allowed, int ranks) {
  std::set<int> here;
  for (const Core& core : allowed) here.insert(core.node);
  if (here.size() < 2 || nodes.size() < static_cast<size_t>(ranks)) return {};
  std::vector<std::vector<int>> cores(static_cast<size_t>(ranks));
  for (size_t rank = 0; rank < cores.size(); ++rank) {
    if (!nodes[rank] || !here.contains(*nodes[rank])) return {};
    for (const Core& core : allowed) {
      if (core.node == *nodes[rank]) cores[rank].push_back(core.cpu);
    }
    std::sort(cores[rank].begin(), cores[rank].end());
  }
  return cores;
}

int cores_per_sharing_rank(const std::vector<std::vector<int>>& bound, const std::vector<Core>& allowed) {
  int smallest = 0;
  for (const std::vector<int>& own : bound) {
    std::vector<Core> cores;
    for (const Core& core : allowed) {
      if (std::find(own.begin(), own.end(), core.cpu) != own.end()) cores.push_back(core);
    }
    const auto sharers = static_cast<int>(std::count(bound.begin(), bound.end(), own));
    const int share = std::max(1, static_cast<int>(physical_cores(std::move(cores)).size()) / sharers);
    smallest = smallest == 0 ? share : std::min(smallest, share);
  }
  return std::max(1, smallest);
}

}  // namespace ds::launcher
