// Which GPUs the ranks see, and how many ranks that makes. Pure, but for count_gpu_devices().
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace ds::launcher {

// GPUs by the name CUDA_VISIBLE_DEVICES gives them: numbers, GPU-uuids or MIG-uuids.
using GpuList = std::vector<std::string>;

// /dev/nvidia0, /dev/nvidia1, ...: counted without loading a CUDA library.
int count_gpu_devices(const std::filesystem::path& dev = "/dev");

// The value of CUDA_VISIBLE_DEVICES when it is set (its order is kept; as CUDA does, the list ends at the first -1),
// else 0 ... devices-1. A machine without devices has none, whatever the variable says.
GpuList visible_gpus(const std::optional<std::string>& cuda_visible_devices, int devices);

// The GPUs of these slots; none where there are none. Throws ConfigError naming a slot without a GPU.
GpuList gpus_of_slots(const GpuList& gpus, const std::vector<int>& slots);

// How many ranks to start, and a note for the user when that is not obvious.
struct RankCount {
  int ranks = 1;
  std::string note;
};

// `asked`: from the command line. Throws ConfigError when --num_gpus asks for more than the visible GPUs (with none
// visible it counts CPU ranks, as DeepSpeed's CPU accelerator does).
RankCount choose_rank_count(const std::optional<int>& asked, bool asked_as_gpus, const GpuList& gpus);

// CUDA_VISIBLE_DEVICES of every rank: the first `ranks` visible GPUs, as DeepSpeed; LOCAL_RANK picks among them. Absent
// when none is visible: then the variable is left as it is.
std::optional<std::string> devices_of_ranks(const GpuList& gpus, int ranks);

}  // namespace ds::launcher
