// The contents of a group's shared region, and where they lie.
//
//   RankBlock[W]                 progress, identity, operation under way, failure
//   row[W][2][W]                 bytes that a rank sends to each other one in an all_to_all
//   stage[W][3][slot_bytes]      chunks of collectives, written by their rank, read by all
//   ring[W][W][ring_bytes]       messages from one rank to another
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iosfwd>
#include <memory>
#include <string>
#include <type_traits>

#include "comm/shared_memory/shared_region.h"
#include "dsengine/comm.h"

namespace ds::comm {

// A counter in shared memory that others can sleep on, on a cache line of its own. Lock-free, so it works between
// processes; all zero is its initial state.
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

// A small struct that may be read while it is being written (the reader then sees a mixture, which only error texts
// ever do).
template <class T>
class AtomicRecord {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);

 public:
  void store(const T& record) {
    uint64_t words[kWords];
    std::memcpy(words, &record, sizeof record);
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
  }
  T load() const {
    uint64_t words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    T record;
    std::memcpy(&record, words, sizeof record);
    return record;
  }

 private:
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);
  std::atomic<uint64_t> words_[kWords]{};
};

// A collective as its rank announces it. All fields must agree on all ranks.
struct OperationRecord {
  uint64_t sequence;  // counts from 1; 0: none yet
  CollectiveKind kind;
  ReduceOp op;
  int8_t dtype;
  int8_t unused;
  int32_t root;
  int64_t count;   // elements, as the kind counts them (those of one part where there are W parts)
  uint64_t check;  // hash of what else must agree
  int64_t step;    // the engine's step, for messages; 0: not known
  char label[88];
  char phase[32];  // Collective::phase, for messages

  bool agrees_with(const OperationRecord& other) const;
  // "all_reduce sum of 12 Float 'h.0.weight' (#3)", or "nothing yet".
  friend std::ostream& operator<<(std::ostream& out, const OperationRecord& record);
};

// The head of a message, ahead of its data.
struct MessageHead {
  int64_t bytes = 0;
  int32_t tag = 0;
  int32_t dtype = 0;
  char label[80] = {};

  // "12 Float 'activation'"
  friend std::ostream& operator<<(std::ostream& out, const MessageHead& head);
};

// A message as its rank announces it, for messages of errors alone.
struct MessageRecord {
  uint64_t sequence;  // counts sends and receives of this rank from 1; 0: none yet
  int64_t step;       // the engine's step; 0: not known
  int32_t is_send;
  int32_t peer;
  MessageHead head;

  // "send of 12 Float 'activation' to rank 1 (message #3, step 2)"
  friend std::ostream& operator<<(std::ostream& out, const MessageRecord& record);
};

// Why a rank has failed.
struct FailureText {
  char text[1024];
};

enum class RankState : uint32_t { kAbsent, kPresent, kFailed, kLeft };

// The block of one rank, which the others read.
struct RankBlock {
  Signal progress;  // steps of collectives this rank has published
  Signal bell;      // rung for this rank when a message or room for one is there
  alignas(64) std::atomic<RankState> state{RankState::kAbsent};
  std::atomic<int64_t> process{0};
  std::atomic<uint64_t> process_start{0};  // clock ticks since boot: tells a process from a later one of the same id
  std::atomic<uint64_t> process_namespace{0};
  std::atomic<uint64_t> begun{0};  // sequence number of the collective begun last
  AtomicRecord<OperationRecord> operations[2];
  AtomicRecord<MessageRecord> message;  // the one begun last
  AtomicRecord<FailureText> failure;
};

// A stream of bytes from one rank to another.
struct RingEnds {
  alignas(64) std::atomic<uint64_t> written{0};
  alignas(64) std::atomic<uint64_t> read{0};
};

// Copies `text` into a fixed field, shortened where it must be.
template <size_t N>
void copy_text(char (&field)[N], const std::string& text) {
  const size_t length = text.size() < N ? text.size() : N - 1;
  std::memcpy(field, text.data(), length);
  std::memset(field + length, 0, N - length);
}

// The region of a group, by what is in it. Keeps the region mapped.
class GroupMemory {
 public:
  static constexpr int kSlots = 3;

  static size_t bytes_for(int size);
  // One rank constructs the objects before any other looks at them.
  static void initialize(SharedRegion& region, int size);

  GroupMemory(std::shared_ptr<SharedRegion> region, int size);

  int size() const { return size_; }
  bool between_processes() const { return region_->between_processes(); }
  size_t slot_bytes() const;
  size_t ring_bytes() const { return ring_bytes_; }

  RankBlock& rank(int rank) const;
  int64_t* row(int rank, uint64_t sequence) const;
  std::byte* stage(int rank, uint64_t chunk) const;
  RingEnds& ring_ends(int source, int destination) const;
  std::byte* ring(int source, int destination) const;

 private:
  struct Offsets {
    size_t rows, ring_ends, stages, rings, end;
  };
  static size_t ring_bytes_for(int size);
  static Offsets offsets_for(int size);

  std::shared_ptr<SharedRegion> region_;
  int size_;
  size_t ring_bytes_;
  Offsets offsets_;
};

}  // namespace ds::comm
