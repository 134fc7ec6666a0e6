// Ranks that are threads of a benchmark.
#pragma once

#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "comm/shared_memory/thread_group.h"

namespace ds::benchmarks {

// Runs `train(communicator)` on so many ranks, and returns what rank 0's call does. Throws what rank 0 throws.
template <class Train>
auto result_of_rank_0(int size, const Train& train) {
  const comm::ThreadGroup group(size);
  decltype(train(group.communicator(0))) of_rank_0;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto result = train(group.communicator(rank));
        if (rank == 0) of_rank_0 = std::move(result);
      } catch (...) {
        if (rank == 0) failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  return of_rank_0;
}

}  // namespace ds::benchmarks
