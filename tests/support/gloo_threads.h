// Gloo groups whose ranks are threads of this process.
#pragma once

#include <chrono>
#include <functional>

#include "comm/gloo/gloo_communicator.h"
#include "tests/support/store_threads.h"

namespace ds::testing {

// Runs `body` once for each rank of a new group, on a thread of its own. An exception fails the test.
inline void on_gloo_threads(int world, const std::function<void(comm::Communicator&)>& body,
                            std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  on_store_threads(world, [&](const auto& store, int rank) {
    const auto communicator = comm::make_gloo_communicator(
        {.store = store, .rank = rank, .size = world, .options = {.timeout = timeout, .address = "127.0.0.1"}});
    body(*communicator);
  });
}

}  // namespace ds::testing
