// Keeps the last collectives of this rank: what, of which group, how far. Always on.
//
// It is an observer of communicators (comm/collective_observer.h): the group that it is attached to is its world.
// Recording one costs about a microsecond. Any thread may call anything.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include "comm/collective.h"
#include "comm/collective_observer.h"
#include "comm/flight/flight_log.h"
#include "comm/flight/flight_memory.h"
#include "core/making_process.h"

namespace ds::comm {

struct FlightRecorderOptions {
  int rank = 0;
  int world_size = 1;
  std::string host;
  uint32_t entries = 512;  // 1 to kMostFlightEntries
  std::string file;        // empty: memory of this process alone. Goes with the recorder unless keep() was called
};

class FlightRecorder final : public CollectiveObserver, public std::enable_shared_from_this<FlightRecorder> {
 public:
  // One entry: where in the ring, and which of those that have been there.
  struct Ticket {
    size_t slot = 0;
    uint64_t sequence = 0;          // 0: nothing was recorded
    c10::Device device{c10::kCPU};  // device of the tensors; a wait may put the operation in order only
  };

  // Throws IoError where FlightMemory does, UsageError for a wrong number of entries.
  explicit FlightRecorder(const FlightRecorderOptions& options);
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Groups beyond kFlightGroups - 1 share the last, which is not compared between ranks.
  int add_group(const std::string& name, const std::vector<int>& ranks, int own) override;

  // Calls begin(), and follow() or failed(), around the operation.
  Work observe(int group, Collective& collective, c10::function_ref<Work()> launch) override;
  // Records that an operation begins. Throws CommError after doom().
  Ticket begin(int group, const Collective& collective);
  // Notes that an operation has failed; sleeps a moment, the first time.
  void failed(const Ticket& ticket);
  // Returns `work` with its waits recorded.
  Work follow(const Ticket& ticket, Work work);

  void phase(const char* name, int64_t step, int64_t micro_step) override;

  // Brings the heartbeat up to date, and the state of operations that end on a device.
  void beat();
  void leave();  // the rank ends in good order
  void keep();   // the file is to stay
  void stop();   // nothing is recorded from now on
  // Every later collective throws CommError with this text.
  void doom(const std::string& text);
  std::string verdict() const override;

  // Whether an operation has held up a thread of this rank for so long.
  bool held_up_for(std::chrono::nanoseconds time) const;
  FlightLog log() const;

 private:
  class FollowedWork;
  class OrderedWork;

  void waiting(const Ticket& ticket);
  void ended(const Ticket& ticket, FlightState state);
  void waited(const Ticket& ticket, const Work& work);
  void end_those_on_device();
  int add_to_others();
  FlightEntry* find(const Ticket& ticket) const;  // null: overwritten since

  FlightMemory memory_;
  mutable std::mutex mutex_;
  std::map<std::tuple<int, CollectiveKind, int, int>, uint64_t> messages_;  // (group, kind, peer, tag) -> how many
  std::map<std::pair<std::string, std::string>, int> names_;                // (name, ranks) of groups -> how many
  std::vector<uint64_t> threads_;                                           // that have made or used the groups
  MakingProcess process_;
  bool recording_ = true;
  std::list<std::pair<Ticket, Work>> on_device_;  // waited for by a stream, not by the host
  std::string doom_;
  std::atomic<bool> failed_{false};
};

}  // namespace ds::comm
