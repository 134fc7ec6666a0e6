// Runs a test body once per rank, on threads joined by the in-memory communicator.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/shared_memory/thread_group.h"

namespace ds::test {

struct ThreadRanksOptions {
  std::chrono::milliseconds communication_timeout = std::chrono::seconds(30);
  // After this the test process ends itself: threads cannot be stopped.
  std::chrono::milliseconds time_limit = std::chrono::seconds(100);
};

// The rank that threw first; its error is nested.
class RankFailure : public std::runtime_error {
 public:
  RankFailure(int rank, const std::string& what)
      : std::runtime_error("rank " + std::to_string(rank) + ": " + what), rank_(rank) {}
  int rank() const { return rank_; }

 private:
  int rank_;
};

namespace internal {

// The state that the threads of one run_ranks() share.
class Run {
 public:
  explicit Run(int world) : running_(world) {}

  void failed(int rank, const std::string& what, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (first_error_) return;
    first_error_ = std::move(error);
    first_rank_ = rank;
    first_text_ = what;
  }
  void done(int rank) {
    const std::lock_guard lock(mutex_);
    --running_;
    finished_.notify_all();
  }
  void wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    if (finished_.wait_for(lock, limit, [this] { return running_ == 0; })) return;
    std::cerr << "run_ranks: " << running_ << " rank(s) hung, still running after " << limit.count() << " ms"
              << (first_error_ ? "; rank " + std::to_string(first_rank_) + " had failed: " + first_text_ : "") << '\n';
    std::abort();
  }
  void rethrow() {
    if (!first_error_) return;
    try {
      std::rethrow_exception(first_error_);
    } catch (...) {
      std::throw_with_nested(RankFailure(first_rank_, first_text_));
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  int running_;
  int first_rank_ = -1;
  std::string first_text_;
  std::exception_ptr first_error_;
};

}  // namespace internal

// Calls body(communicator) on `world` threads, one per rank. When ranks throw, throws RankFailure of the first of them
// after all have ended; a rank that ends early closes its communicator, so the others fail instead of waiting for it.
template <class Body>
void run_ranks(int world, Body&& body, const ThreadRanksOptions& options = {}) {
  const comm::ThreadGroup group(world, options.communication_timeout);
  internal::Run run(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const std::shared_ptr<comm::Communicator> communicator = group.communicator(rank);
        body(*communicator);
      } catch (const std::exception& error) {
        run.failed(rank, error.what(), std::current_exception());
      } catch (...) {
        run.failed(rank, "threw something that is no std::exception", std::current_exception());
      }
      run.done(rank);
    });
  }
  run.wait(options.time_limit);
  for (std::thread& thread : threads) thread.join();
  run.rethrow();
}

}  // namespace ds::test
