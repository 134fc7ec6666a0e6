// Waiting for the other ranks of a group on one host: with a time limit, noticing those that failed, left or died.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "comm/shared_memory/shared_memory_layout.h"
#include "core/text.h"

namespace ds::comm {

// Used by the threads of one rank. All members but the constructor are thread safe.
class SharedMemoryPeers {
 public:
  using Clock = std::chrono::steady_clock;
  // How long a sleep lasts before failures and deaths are looked for.
  static constexpr std::chrono::milliseconds kLook{100};

  // Announces this rank to the others.
  // `verdict`: Communicator::verdict().
  SharedMemoryPeers(GroupMemory& memory, int rank, std::string group, std::chrono::milliseconds timeout,
                    std::function<std::string()> verdict);

  std::chrono::milliseconds timeout() const { return timeout_; }

  // Returns once every rank has published `step`. Throws CommError naming `operation` and the ranks that have not
  // arrived: at the time limit, and as soon as one of them has failed, left or died.
  void await_step(uint32_t step, const OperationRecord& operation);

  // Throws CommError when waiting any longer for `peer` is pointless: it has failed, left or died, any other rank has
  // failed, this rank's communicator is being destroyed, or there is a verdict, which the error then says. `operation`
  // is for the message.
  void require_hope(int peer, const Printable& operation) const;

  // The part of require_hope that concerns no rank in particular: throws when one has failed.
  void require_none_failed(const Printable& operation) const;

  // "rank 3 (process 4711, alive; last began all_reduce sum of 12 float32 'h.0' (#3))"
  std::string describe(int peer) const;

  // Tells all ranks that this one cannot go on. The first text counts.
  void publish_failure(const std::string& text);
  void publish_departure();
  // Lets waits end with CommError at `limit` from now on.
  void abandon_at(Clock::time_point limit) { abandon_at_.store(limit.time_since_epoch().count()); }

  const std::string& group() const { return group_; }
  int spin_turns() const { return spin_turns_; }

 private:
  [[noreturn]] void give_up(const Printable& operation, const std::string& reason) const;
  void sleep_until(int peer, uint32_t step, const OperationRecord& operation);
  std::string missing(uint32_t step) const;
  // Whether the process of a rank has ended; nothing is known of threads and of other process-id namespaces.
  bool dead(int peer) const;

  GroupMemory& memory_;
  const int rank_;
  const std::string group_;
  const std::chrono::milliseconds timeout_;
  const std::function<std::string()> verdict_;
  const int spin_turns_;
  std::atomic<Clock::rep> abandon_at_;
};

}  // namespace ds::comm
