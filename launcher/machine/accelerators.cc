#include "launcher/machine/accelerators.h"

#include <algorithm>

#include "core/check.h"

namespace ds::launcher {

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

}  // namespace ds::launcher
