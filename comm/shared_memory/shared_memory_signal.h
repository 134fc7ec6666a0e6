// A counter in shared memory that others can sleep on. Torch-free.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ds::comm {

// On a cache line of its own. Lock-free, so it works between processes; all zero is its initial state.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  // Makes all that was written before visible to whoever reads the value, and wakes the sleepers.
  void publish(uint32_t new_value);
  void ring();  // publishes the next value; any number of threads
  void wake();

  // Sleeps until the value is no longer `seen`, at most for `limit`; may return early.
  void sleep(uint32_t seen, std::chrono::microseconds limit);
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// Counters may wrap around: true when `value` is at or behind `target`.
inline bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

// One turn of a busy wait.
void relax_core();

// Turns of busy wait before a sleep, when this many ranks share the cores this process may use: spinning beside threads
// that compute steals their time, so it is short unless there are cores to spare.
int spin_turns(int ranks);

}  // namespace ds::comm
