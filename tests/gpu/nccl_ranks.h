// Ranks as threads of this process, each with a GPU of its own, joined by NCCL.
#pragma once

#include <torch/cuda.h>

#include <memory>
#include <string>

#include "comm/backends/cuda_plugin.h"
#include "comm/shared_memory/thread_group.h"
#include "core/text.h"
#include "tests/gpu/tested_device.h"
#include "tests/support/store_threads.h"

namespace ds::test {

// Why ranks on so many GPUs cannot be: what is wanted and what there is. Empty where they can.
inline std::string missing_gpus(int wanted) {
  if (tested_device().is_cpu()) return cat("needs ", wanted, " GPUs, found none: DS_TEST_DEVICE=cpu");
  const auto found = static_cast<int>(torch::cuda::device_count());
  return found >= wanted ? "" : cat("needs ", wanted, " GPUs, found ", found);
}

// body(communicator, device), once for each rank.
template <class Body>
void on_gpus(int world, Body&& body) {
  testing::on_store_threads(world, [&](const auto& store, int rank) {
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
    const std::shared_ptr<comm::Communicator> ranks = comm::cuda_plugin().make_nccl_communicator(
        {.store = store, .rank = rank, .size = world, .device = device, .timeout = std::chrono::seconds(60)});
    body(*ranks, device);
  });
}

// One rank is alone on the tested device.
template <class Body>
void on_devices(int world, Body&& body) {
  if (world > 1) return on_gpus(world, body);
  const auto alone = comm::ThreadGroup(1).communicator(0);
  body(*alone, tested_device());
}

}  // namespace ds::test
