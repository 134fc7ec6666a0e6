#include "comm/shared_memory/shared_memory_signal.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds::comm {
namespace {

// The word lives in memory that may be shared between processes, hence no FUTEX_PRIVATE_FLAG.
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr, 0);
}

}  // namespace

void Signal::publish(uint32_t new_value) {
  value.store(new_value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Signal::ring() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Signal::wake() { futex(&value, FUTEX_WAKE, INT_MAX, nullptr); }

void Signal::sleep(uint32_t seen, std::chrono::microseconds limit) {
  timespec time{};
  time.tv_sec = limit.count() / 1'000'000;
  time.tv_nsec = limit.count() % 1'000'000 * 1000;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (value.load(std::memory_order_seq_cst) == seen) futex(&value, FUTEX_WAIT, seen, &time);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void relax_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int spin_turns(int ranks) {
  static const int kCores = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }();
  return ranks < kCores ? 4000 : 200;
}

}  // namespace ds::comm
