// Ranks as threads of this process that share a store.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <thread>
#include <vector>

namespace ds::testing {

using StoreBody = std::function<void(const c10::intrusive_ptr<c10d::Store>& store, int rank)>;

// Runs `body` once for each rank, on a thread of its own. An exception fails the test.
inline void on_store_threads(int world, const StoreBody& body) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(store, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace ds::testing
