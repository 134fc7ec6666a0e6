// Ranks as threads of this process, each with a GPU of its own, joined by NCCL.
#pragma once

#include <memory>

#include "comm/backends/cuda_plugin.h"
#include "tests/support/store_threads.h"

namespace ds::test {

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

}  // namespace ds::test
