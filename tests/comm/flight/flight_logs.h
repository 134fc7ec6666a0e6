// Flight logs of ranks, made by recorders, for tests of what follows from them.
#pragma once

#include <ATen/ops/empty.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/flight/flight_recorder.h"

namespace ds::comm::testing {

inline Collective all_reduce_of(int64_t elements, const std::string& label, at::ScalarType dtype = at::kFloat) {
  const at::Tensor tensor = at::empty({elements}, dtype);
  return {.kind = CollectiveKind::kAllReduce, .input = tensor, .output = tensor, .label = label};
}

inline Collective message_of(CollectiveKind kind, int peer) {
  const at::Tensor tensor = at::empty({3});
  Collective message{.kind = kind, .peer = peer};
  (kind == CollectiveKind::kSend ? message.input : message.output) = tensor;
  return message;
}

// One rank of a world, in the group of all of them and in such groups as are added.
class LoggedRank {
 public:
  LoggedRank(int rank, int world_size, uint32_t entries = 64)
      : recorder_(std::make_shared<FlightRecorder>(
            FlightRecorderOptions{.rank = rank, .world_size = world_size, .host = "host", .entries = entries})) {
    std::vector<int> all;
    for (int r = 0; r < world_size; ++r) all.push_back(r);
    recorder_->add_group("world", all, rank);
  }

  void issue(const Collective& collective, int group = 0) {
    tickets_.push_back(recorder_->begin(group, collective));
    recorder_->follow(tickets_.back(), Work()).wait();
  }
  // Does not come back from it.
  void wait_in(const Collective& collective, int group = 0) {
    const FlightRecorder::Ticket ticket = recorder_->begin(group, collective);
    stuck_ = ticket.sequence;
  }

  FlightLog log(double waited_seconds = 0) const {
    recorder_->beat();
    FlightLog log = recorder_->log();
    for (FlightEntry& entry : log.entries) {
      if (entry.sequence != stuck_) continue;
      entry.state = FlightState::kWaiting;
      entry.waited_ns = log.header.now_ns - static_cast<int64_t>(waited_seconds * 1e9);
    }
    return log;
  }
  FlightRecorder& recorder() { return *recorder_; }

 private:
  std::shared_ptr<FlightRecorder> recorder_;
  std::vector<FlightRecorder::Ticket> tickets_;
  uint64_t stuck_ = 0;
};

inline std::vector<std::unique_ptr<LoggedRank>> logged_ranks(int world_size, uint32_t entries = 64) {
  std::vector<std::unique_ptr<LoggedRank>> ranks;
  for (int r = 0; r < world_size; ++r) ranks.push_back(std::make_unique<LoggedRank>(r, world_size, entries));
  return ranks;
}

inline std::vector<FlightLog> logs_of(const std::vector<std::unique_ptr<LoggedRank>>& ranks,
                                      double waited_seconds = 0) {
  std::vector<FlightLog> logs;
  for (const auto& rank : ranks) logs.push_back(rank->log(waited_seconds));
  return logs;
}

}  // namespace ds::comm::testing
