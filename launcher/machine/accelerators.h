// The GPUs that ranks see, the number of ranks that makes, and the cores beside each GPU. Pure, but for
// count_gpu_devices() and nodes_of_gpus().
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "launcher/machine/core_binding.h"

namespace ds::launcher {

// GPUs by the name CUDA_VISIBLE_DEVICES gives them: numbers, GPU-uuids or MIG-uuids.
using GpuList = std::vector<std::string>;

// The number of files /dev/nvidia0, /dev/nvidia1, ...; no CUDA library is loaded.
int count_gpu_devices(const std::filesystem::path& dev = "/dev");

// The value of CUDA_VISIBLE_DEVICES when it is set (its order is kept; as CUDA does, the list ends at the first -1),
// else 0 ... devices-1. A machine without devices has none, whatever the variable says.
GpuList visible_gpus(const std::optional<std::string>& cuda_visible_devices, int devices);

// The GPUs of these slots; none where there are none. Throws ConfigError naming a slot without a GPU.
GpuList gpus_of_slots(const GpuList& gpus, const std::vector<int>& slots);

// The number of ranks to start, and a note for the user when that is not obvious.
struct RankCount {
  int ranks = 1;
  std::string note;
};

// Chooses the number of ranks. `asked`: from the command line. Throws ConfigError when --num_gpus asks for more than
// the visible GPUs (with none visible it counts CPU ranks, as DeepSpeed's CPU accelerator does).
RankCount choose_rank_count(const std::optional<int>& asked, bool asked_as_gpus, const GpuList& gpus);

// CUDA_VISIBLE_DEVICES for every rank: the first `ranks` visible GPUs, as in DeepSpeed; LOCAL_RANK picks among them.
// Absent when none is visible: then the variable is left as it is.
std::optional<std::string> devices_of_ranks(const GpuList& gpus, int ranks);

// The NUMA node of each of `gpus`, in their order, from the driver (/proc/driver/nvidia/gpus) and the kernel
// (/sys/bus/pci/devices); none where they do not tell. Numbers count the GPUs in the order of the bus, which is CUDA's
// where they are all of one model, and where all are this process's: the driver tells of those that a control group or
// a container hides, too, which CUDA does not count. Where a device file (/dev/nvidiaN) cannot be used no number has a
// node.
std::vector<std::optional<int>> nodes_of_gpus(const GpuList& gpus,
                                              const std::filesystem::path& driver = "/proc/driver/nvidia/gpus",
                                              const std::filesystem::path& devices = "/sys/bus/pci/devices",
                                              const std::filesystem::path& dev = "/dev");

// The cores of `allowed` on the NUMA node of the GPU of each rank, because copies of a rank on the other socket cross
// to its GPU; ranks of one node share them all. Empty, so that nothing is bound: where `allowed` lies on one node, a
// rank has no GPU, or a GPU's node is not known or has no core here.
std::vector<std::vector<int>> cores_beside_gpus(const std::vector<std::optional<int>>& nodes,
                                                const std::vector<Core>& allowed, int ranks);

// Physical cores for each rank where ranks share what they are bound to: the smallest share of all ranks, at least 1.
int cores_per_sharing_rank(const std::vector<std::vector<int>>& bound, const std::vector<Core>& allowed);

}  // namespace ds::launcher
