// The NUMA node that each GPU is next to, and the cores there: copies of a rank on the other socket cross to its GPU.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "launcher/machine/accelerators.h"
#include "launcher/machine/core_binding.h"

namespace ds::launcher {

// Of each of `gpus`, in their order, as the driver (/proc/driver/nvidia/gpus) and the kernel (/sys/bus/pci/devices)
// tell; none where they do not. Numbers count the GPUs in the order of the bus, which is CUDA's where they are all of
// one model, and where all are this process's: the driver tells of those that a control group or a container hides,
// too, which CUDA does not count. Where a device file (/dev/nvidiaN) cannot be used no number has a node.
std::vector<std::optional<int>> nodes_of_gpus(const GpuList& gpus,
                                              const std::filesystem::path& driver = "/proc/driver/nvidia/gpus",
                                              const std::filesystem::path& devices = "/sys/bus/pci/devices",
                                              const std::filesystem::path& dev = "/dev");

// For each rank the cores of `allowed` on the node of its GPU; ranks of one node share them all. Empty, so that nothing
// is bound: where `allowed` lies on one node, a rank has no GPU, or a GPU's node is not known or has no core here.
std::vector<std::vector<int>> cores_beside_gpus(const std::vector<std::optional<int>>& nodes,
                                                const std::vector<Core>& allowed, int ranks);

// Physical cores for each rank where ranks share what they are bound to: the smallest share of all ranks, at least 1.
int cores_per_sharing_rank(const std::vector<std::vector<int>>& bound, const std::vector<Core>& allowed);

}  // namespace ds::launcher
