// Gloo groups whose ranks are threads of this process.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/gloo_communicator.h"

namespace ds::testing {

// Runs `body` once for each rank of a new group, on a thread of its own. An exception fails the test.
inline void on_gloo_threads(int world, const std::function<void(comm::Communicator&)>& body,
                            std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator = comm::make_gloo_communicator(
            {.store = store, .rank = rank, .size = world, .options = {.timeout = timeout, .address = "127.0.0.1"}});
        body(*communicator);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace ds::testing
