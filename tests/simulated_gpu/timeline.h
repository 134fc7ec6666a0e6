// Streams, events and memory of a simulated GPU: what runs when, and which accesses to memory nothing orders.
//
// Work of a stream runs as late as it may: when the host waits for it, when an operation of the same stream comes after
// it, or when a stream that waits for it has to go on. A copy that nothing waited for is thus still missing where it is
// used. Besides, each access to memory gets a vector clock (Mattern 1989; FastTrack, Flanagan and Freund, PLDI 2009,
// for what may be forgotten): two accesses of one place, at least one of which writes, that no event or wait of the
// host orders are reported, whatever they happened to do this time. Accesses by the host are not seen, only their
// results: bytes of pinned memory that a stream has read are looked at again when the host has waited for that, and
// reported where they have changed.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/simulated_gpu/pinned_reads.h"

namespace ds::simulated_gpu {

using Clock = std::vector<uint64_t>;  // by stream: how many of its tasks have happened before

// Bytes [begin, end) that a task reads or writes.
struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool write = false;
};

// A point in a stream's order.
struct Point {
  size_t stream = 0;
  uint64_t position = 0;  // tasks given to the stream before
  Clock clock;
};

// Of pinned memory: registered by its owner, who waits before it goes, or LibTorch's, whose allocator waits.
enum class Where : uint8_t { kDevice, kRegisteredHost, kAllocatedHost };

// Thread safe. All threads of the host count as one: what one has waited for, all have.
class Timeline {
 public:
  static Timeline& instance();

  // The number of a stream, from here on.
  size_t stream(int device, int64_t id);

  // Gives the stream a task. It runs when something needs it, on the thread that does.
  Point enqueue(size_t stream, std::string name, const std::vector<Access>& accesses, std::function<void()> run);
  // An access of the task that was given last, known only after it.
  void add_access(const Point& task, const std::string& name, Access access);
  Point now(size_t stream);
  void block(size_t stream, const Point& point);  // the stream goes on after the point
  // Runs what has to run before the point is reached. An exception of a task comes out of the first one that waits,
  // once the point is reached.
  void run_until(const Point& point);
  // As run_until; the host, and what it gives to streams from now on, comes after the point. `what` makes it wait, for
  // the count; empty: it does not count.
  void wait(const Point& point, const std::string& what);
  bool reached(const Point& point);
  void wait_for_all();
  void wait_for_device(int device);
  // Runs the tasks so far that use pinned memory in these bytes.
  void run_all_on(uintptr_t begin, size_t bytes);

  // Memory that streams may use. Freed memory is given to `release` once nothing can use it; what is not ordered before
  // is reported, the streams of `add_user` aside.
  void add_memory(uintptr_t begin, size_t bytes, Where where, size_t stream);
  void add_user(uintptr_t address, size_t stream);
  // Returns how many bytes it had; 0: it is not known.
  size_t free_memory(uintptr_t begin, std::function<void()> release);
  bool is_pinned(uintptr_t address);

  // How often the host has waited since the last call, by what made it wait. A wait with nothing given to the stream
  // after the point is one that leaves a device idle, "(nothing behind it)".
  std::map<std::string, int64_t> take_waits();

  // Something else that is wrong.
  void add_report(std::string text);
  // What was found since the last call, a line each. Reads that the host never waited for are over.
  std::vector<std::string> take_reports();

 private:
  struct Task {
    std::function<void()> run;
    std::vector<Point> after;
    std::vector<PinnedReads::Read> reads;  // of pinned memory
    std::vector<Access> writes;            // likewise
  };
  struct Stream {
    std::string name;
    int device = 0;
    Clock clock;
    std::deque<Task> tasks;
    uint64_t given = 0;
    uint64_t done = 0;
    bool running = false;
  };
  struct Past {
    Access access;
    size_t stream = 0;
    uint64_t time = 0;
    std::string name;
  };
  struct Memory {
    size_t bytes = 0;
    Where where = Where::kDevice;
    size_t stream = 0;
    std::vector<size_t> users;
    std::vector<Past> past;
  };
  struct Freed {
    std::vector<std::pair<size_t, uint64_t>> after;  // stream, position
    std::function<void()> release;
  };
  using Lock = std::unique_lock<std::mutex>;

  void run_until(Lock& lock, size_t stream, uint64_t position);
  Memory* memory_at(uintptr_t address, uintptr_t* begin = nullptr);
  void check(const Point& task, const std::string& name, Access access);
  // Of reads that are over: the host changed their bytes too early.
  void end_reads(const std::function<bool(const PinnedReads::Read&)>& over);
  void report(std::string text);
  void release_freed(Lock& lock);
  std::string text_of(const Past& past, uintptr_t begin) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int64_t>, size_t> numbers_;
  std::deque<Stream> streams_;
  Clock host_;
  std::map<uintptr_t, Memory> memory_;
  std::vector<Freed> freed_;
  PinnedReads reads_;
  std::vector<std::string> reports_;
  std::map<std::string, int64_t> waits_;
};

}  // namespace ds::simulated_gpu
