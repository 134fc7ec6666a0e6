// The threads of a FlightWatch and the state that they share. Included by flight_watch.cc, flight_judge.cc and
// flight_guard.cc only.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/flight/flight_watch.h"
#include "comm/flight/host_stack.h"
#include "comm/flight/stall_explanation.h"
#include "core/text.h"

namespace ds::comm {
namespace flight {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::chrono::milliseconds kShortestInterval{50};
constexpr std::chrono::milliseconds kLongestInterval{1000};
constexpr std::chrono::milliseconds kStackLimit{300};
constexpr std::chrono::milliseconds kHeldUp{200};  // after so long in one operation a rank shows its board more often
constexpr int kRanksPerSecond = 512;               // boards that rank 0 reads
constexpr double kShortestSilence = 3;
constexpr std::chrono::seconds kSteady{60};  // age of a connection that has proved good

// Keys of the store.
inline std::string board_key(int rank) { return cat("board/", rank); }
inline std::string alarm_key(int alarm) { return cat("alarm/", alarm); }
inline std::string gone_key(int rank) { return cat("gone/", rank); }
inline std::string deaf_key(int rank) { return cat("deaf/", rank); }
inline std::string read_key(int rank) { return cat("read/", rank); }  // it has the verdict
inline std::string record_key(int alarm, int rank) { return cat("record/", alarm, "/", rank); }
constexpr const char* kVerdict = "verdict";
constexpr const char* kJob = "job";
constexpr const char* kClosing = "closing";  // rank 0 ends, and the store with it

inline std::vector<uint8_t> to_value(const std::string& text) { return {text.begin(), text.end()}; }
inline std::string to_text(const std::vector<uint8_t>& value) { return {value.begin(), value.end()}; }

// How long its oldest wait has lasted, at its last heartbeat.
inline double waiting_seconds(const FlightLog& log) {
  const FlightEntry* const entry = log.waiting();
  return entry == nullptr ? 0 : static_cast<double>(log.header.now_ns - entry->waited_ns) * 1e-9;
}

}  // namespace flight

// The state that the threads share with their owner; it outlives the owner where a store does not answer.
struct FlightWatch::State {
  c10::intrusive_ptr<c10d::Store> meeting;
  c10::intrusive_ptr<c10d::Store> store;  // a connection of the watch's own, for the thread that talks
  std::atomic<bool> deaf{false};          // the thread that talks has given up
  std::shared_ptr<FlightRecorder> recorder;
  std::vector<RankPlace> ranks;
  int rank = 0;
  bool has_secret = false;
  std::string folder;
  std::optional<HostStack> stack;  // empty: stacks are not asked for
  std::atomic<bool> end_process{true};
  std::atomic<int64_t> limit_ms{0};

  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false;
  int running = 0;  // threads

  std::atomic<bool> lost{false};          // the store has ended
  std::atomic<bool> closed{false};        // the store has ended in good order, and rank 0 with it
  std::atomic<int64_t> asked_ns{0};       // since when the store has not answered; 0: it has
  std::atomic<bool> first_silent{false};  // rank 0 gives no sign of life, though the store does (torchrun keeps it)
  std::atomic<bool> ending{false};

  double limit() const { return static_cast<double>(limit_ms.load()) * 1e-3; }
  std::chrono::milliseconds interval() const {
    const int64_t eighth = limit_ms > 0 ? limit_ms / 8 : flight::kLongestInterval.count();
    const std::chrono::milliseconds base(
        std::clamp(eighth, int64_t{flight::kShortestInterval.count()}, int64_t{flight::kLongestInterval.count()}));
    return std::max(base, shortest_interval());
  }
  // As often as rank 0 can read all boards.
  std::chrono::milliseconds shortest_interval() const {
    return std::chrono::milliseconds(1000 * static_cast<int64_t>(ranks.size()) / flight::kRanksPerSecond);
  }
  double dead_after() const { return std::max(limit() / 2, 3 * flight::Seconds(interval()).count()); }
  bool near(int other) const {
    return ranks[static_cast<size_t>(other)].domain == ranks[static_cast<size_t>(rank)].domain;
  }

  // Whether this process was stopped (SIGSTOP, Ctrl-Z) since `last`, which becomes now.
  bool was_stopped(flight::Clock::time_point& last) const;
  // Sleeps. False: it is time to stop.
  bool pause(std::chrono::milliseconds time);
  // Lets every later collective of this rank throw CommError with this text.
  void end(const std::string& text);
};

// Compares, on rank 0, the boards of all ranks, and raises the alarm when they stall. Used by the thread that talks.
class FlightWatch::Judge {
 public:
  // Both arguments outlive it.
  Judge(State& state, Talk& talk) : state_(state), talk_(talk), peers_(state.ranks.size()) {}

  // Reads the boards and judges them.
  void look();
  // Takes all ranks for heard from at `time`: this process was stopped until now.
  void count_from(flight::Clock::time_point time);

 private:
  struct Peer {
    std::optional<FlightLog> board;
    flight::Clock::time_point heard = flight::Clock::now();
    bool deaf = false;  // it lives, but its connection does not
  };

  void read_boards();
  void judge();
  bool closes_circle(const std::vector<FlightLog>& boards);
  double silence(int other) const;
  bool answers(int other) const;
  bool is_of(const FlightLog& log, int other) const;
  FlightLog unheard(int other) const;
  void raise_alarm(bool stalled);
  std::vector<FlightLog> collect(int alarm);
  std::string write_records(const std::vector<FlightLog>& logs, const StallExplanation& stall, int alarm);
  void await_readers();

  State& state_;
  Talk& talk_;
  std::vector<Peer> peers_;
  int alarms_ = 0;
  flight::Clock::time_point next_comparison_{};
  std::vector<WaitInCircle> circle_;  // that the boards showed at the last look
  double next_report_ = 0;            // seconds of the running stall at which to say more; 0: none runs
};

// The thread that talks to the store: shows this rank's board, answers alarms and obeys the verdict; on rank 0 it
// judges.
class FlightWatch::Talk {
 public:
  // `state` outlives it.
  explicit Talk(State& state);
  // Returns when the watch ends, or the store does not answer any more.
  void run();

  // Shows this rank's board to the others and returns it.
  FlightLog show_board();
  // Returns this rank's whole record, with its stack and the state of its neighbours.
  FlightLog full_log();
  // Until when nobody is judged: other processes may have been stopped as this one was.
  flight::Clock::time_point quiet_until() const { return quiet_until_; }

 private:
  bool rest();
  bool reconnect(const std::string& why);
  void give_up(const std::string& why);
  void exchange();
  void answer(int alarm);
  void listen_to_first(const FlightLog& own);
  void look_for_strangers();
  void say_goodbye();
  void obey(const std::string& verdict);

  State& state_;
  std::unique_ptr<Judge> judge_;  // rank 0's; else null
  int reconnections_ = 0;         // since the last connection that proved good
  int alarms_seen_ = 0;
  flight::Clock::time_point last_turn_ = flight::Clock::now();
  flight::Clock::time_point connected_ = flight::Clock::now();
  flight::Clock::time_point exchanged_ = flight::Clock::now();
  int64_t first_beat_ = 0;  // rank 0's heartbeat, when this rank waits for long
  flight::Clock::time_point first_heard_ = flight::Clock::now();
  flight::Clock::time_point quiet_until_{};
  bool stranger_told_ = false;
};

// The thread that guards: judges this rank alone where the store does not answer, and ends the process when it hangs
// on.
class FlightWatch::Guard {
 public:
  // `state` outlives it.
  explicit Guard(State& state) : state_(state) {}
  // Returns when the watch ends.
  void run();

 private:
  void judge_alone();

  State& state_;
  flight::Clock::time_point last_look_ = flight::Clock::now();
  flight::Clock::time_point trusts_from_{};  // until when nobody is judged after this process was stopped
  bool told_ = false;                        // has said that nobody judges stalls any more
};

}  // namespace ds::comm
