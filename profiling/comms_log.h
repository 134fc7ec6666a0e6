// Times every operation between ranks, and sums the times up by operation, group and size (comms_logger).
//
// An observer of communicators (comm/collective_observer.h) that makes nothing wait. On the host an operation ends when
// the implementation says so, or where it cannot, when somebody has waited. On a device events tell when it began and
// ended: the end is put on a stream of its own behind the operation, so that it is not that of what the program's
// stream does meanwhile; the host reads the events of a step in a later one. Any thread may call anything.
#pragma once

#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "comm/collective_observer.h"
#include "profiling/comms_record.h"
#include "profiling/device_clock.h"
#include "profiling/meters.h"

namespace ds::profiling {

// For each comm::CollectiveKind, whether it is logged.
using LoggedOperations = std::array<bool, comm::kCollectiveKinds>;

struct CommsLogOptions {
  int rank = 0;  // the rank of the world that lines name
  LoggedOperations operations{};
  bool verbose = false;      // a line of the log for each operation, where the level info is logged
  bool with_labels = false;  // records by label too
};

// The bytes of the full tensor that ranks of a group exchange: of all_gather, gather, reduce_scatter and scatter the
// parts of all ranks together; of a message its own; of all_to_all what this rank gives away. A barrier has none.
int64_t whole_bytes(const comm::Collective& collective, size_t ranks);

class CommsLog final : public std::enable_shared_from_this<CommsLog> {
 public:
  static constexpr size_t kMostSizes = 1024;  // sizes of a group; operations of further ones share records
  using Clock = std::function<double()>;      // seconds

  explicit CommsLog(const CommsLogOptions& options, Clock clock = monotonic_seconds);
  CommsLog(const CommsLog&) = delete;
  CommsLog& operator=(const CommsLog&) = delete;

  // Makes an observer, for Communicator::observe_with, of a group of these ranks of the world. It holds the log.
  std::shared_ptr<comm::CollectiveObserver> observer_of(std::vector<int> ranks);
  // Whether it observes a group of this name.
  bool sees(const std::string& group) const;
  // Pauses the log on this rank while it lives: nothing is timed.
  class Pause {
   public:
    explicit Pause(CommsLog& log) : log_(log) { ++log_.pauses_; }
    ~Pause() { --log_.pauses_; }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    CommsLog& log_;
  };
  // Ends the log: nothing is timed from now on.
  void stop() { ++pauses_; }

  // The records of what has ended so far. `waits`: also waits for what a device has been given.
  std::vector<CommsRecord> records(bool waits);

 private:
  class Observer;
  class Operation;
  class TimedWork;
  using Moment = DeviceClock::Moment;

  struct Key {
    comm::CollectiveKind kind;
    std::string label;  // with_labels
    int64_t bytes;
    auto operator<=>(const Key&) const = default;
  };
  struct Group {
    std::string name;
    std::vector<int> ranks;
    std::map<Key, CommsRecord> records;  // they stay where they are
    double last_end = 0;                 // the end of its last collective on the host
    Moment last_end_on_device;           // the end of its last collective on a device
    bool used_on_device = false;
    std::map<std::pair<comm::CollectiveKind, int>, c10::Stream> streams;  // by kind and peer of messages
  };
  // The operation that is timed, apart from its times.
  struct Subject {
    Group* group = nullptr;
    CommsRecord* record = nullptr;
    int64_t number = 0;  // in its record
    int64_t bytes = 0;
    comm::CollectiveKind kind = comm::CollectiveKind::kBarrier;
    int peer = 0;
    bool is_message() const { return kind == comm::CollectiveKind::kSend || kind == comm::CollectiveKind::kRecv; }
  };
  // An operation that a device has not been seen to end.
  struct UnderWay {
    Subject subject;
    Moment begin;
    std::optional<Moment> after;  // end of the one before it in its group
    Moment end;
    std::vector<at::Tensor> held;  // nobody waits for them
  };

  int add_group(const std::string& name, std::vector<int> ranks);
  comm::Work observe(int group, comm::Collective& collective, c10::function_ref<comm::Work()> launch);
  void step_begins(int64_t step);
  Subject begin(int group, const comm::Collective& collective);
  c10::Stream stream_of(const Subject& subject, c10::Device device);
  void end_on_host(const Subject& subject, double begin);
  void end_on_device(UnderWay operation);
  // Holds the tensors until the device has come to the end.
  void hold(std::vector<at::Tensor> tensors, const Moment& end);
  // Adds an operation to its record. Called with the lock; returns a line for the log, which is to be written without.
  std::string add(const Subject& subject, double seconds);
  void read_ended(bool waits);

  const CommsLogOptions options_;
  const Clock clock_;
  std::atomic<int> pauses_{0};
  mutable std::mutex mutex_;
  std::deque<Group> groups_;  // they stay where they are
  std::deque<UnderWay> under_way_;
  int64_t step_ = 0;
};

}  // namespace ds::profiling
