// Rank 0 judges the boards of all ranks.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "comm/flight/contract.h"
#include "comm/flight/flight_folder.h"
#include "comm/flight/flight_watch_state.h"
#include "core/check.h"
#include "core/log.h"
#include "core/text.h"

namespace ds::comm {

using namespace flight;

void FlightWatch::Judge::count_from(Clock::time_point time) {
  for (Peer& peer : peers_) peer.heard = time;
}

void FlightWatch::Judge::look() {
  read_boards();
  judge();
}

void FlightWatch::Judge::read_boards() {
  std::vector<std::string> keys;
  std::vector<size_t> of;
  for (size_t other = 0; other < peers_.size(); ++other) {
    if (!peers_[other].board && !state_.store->check({board_key(static_cast<int>(other))})) continue;
    keys.push_back(board_key(static_cast<int>(other)));
    of.push_back(other);
  }
  const auto values = state_.store->multiGet(keys);
  for (size_t i = 0; i < values.size(); ++i) {
    Peer& peer = peers_[of[i]];
    FlightLog board = log_from_bytes(to_text(values[i]), keys[i]);
    if (!peer.board || board.header.now_ns != peer.board->header.now_ns) peer.heard = Clock::now();
    peer.board = std::move(board);
    const int other = static_cast<int>(of[i]);
    if (!peer.deaf && silence(other) > 0) peer.deaf = state_.store->check({deaf_key(other)});
  }
}

// Returns the seconds since a rank's last heartbeat, where that is longer than usual. Nobody can tell for a deaf rank.
double FlightWatch::Judge::silence(int other) const {
  if (peers_[static_cast<size_t>(other)].deaf) return 0;
  const double seconds = Seconds(Clock::now() - peers_[static_cast<size_t>(other)].heard).count();
  return seconds > std::max(kShortestSilence, 3 * Seconds(state_.interval()).count()) || seconds > state_.dead_after()
             ? seconds
             : 0;
}

void FlightWatch::Judge::judge() {
  if (Clock::now() < talk_.quiet_until() || state_.ending) return;
  double longest = 0;
  std::vector<FlightLog> boards;
  for (const Peer& peer : peers_) {
    if (!peer.board) continue;
    if (peer.board->header.left == 0 && !peer.deaf) {
      longest = std::max(longest, waiting_seconds(*peer.board) + silence(peer.board->header.rank));
    }
    boards.push_back(*peer.board);
  }
  if (next_report_ > 0 && longest < state_.limit()) {
    log::warning("the stall is over: all ranks go on");
    next_report_ = 0;
  }
  const bool stalled = state_.limit_ms > 0 && longest > std::max(state_.limit(), next_report_);
  const bool hopeless = closes_circle(boards) || find_breach(boards);
  if (!stalled && (Clock::now() < next_comparison_ || !hopeless)) return;
  next_comparison_ = Clock::now() + 10 * state_.interval();  // where the records do not bear it out
  raise_alarm(stalled);
}

// Whether the boards show for the second time that ranks wait for each other, each still in the same operation. Boards
// are not of one moment: that of a rank may be older than what another one did meanwhile.
bool FlightWatch::Judge::closes_circle(const std::vector<FlightLog>& boards) {
  std::vector<WaitInCircle> circle = find_circle(boards, static_cast<int>(peers_.size()));
  const bool again =
      !circle.empty() && std::equal(circle.begin(), circle.end(), circle_.begin(), circle_.end(),
                                    [](const WaitInCircle& now, const WaitInCircle& before) {
                                      return now.rank == before.rank && now.operation == before.operation;
                                    });
  if (!again) {
    circle_ = std::move(circle);
    return false;
  }
  for (size_t i = 0; i < circle.size(); ++i) {
    if (circle[i].board_ns <= circle_[i].board_ns) return false;  // not heard of since
  }
  return true;
}

// Whether it is the record of this start of the job; the number of a process may come back on another host.
bool FlightWatch::Judge::is_of(const FlightLog& log, int other) const {
  const RankPlace& place = state_.ranks[static_cast<size_t>(other)];
  decltype(FlightHeader::host) host{};
  host.assign(place.host_name);
  return log.header.rank == other && log.header.process == place.process && log.header.host.bytes == host.bytes;
}

// Returns what is known of a rank that does not answer.
FlightLog FlightWatch::Judge::unheard(int other) const {
  FlightLog log;
  if (!state_.folder.empty() && state_.near(other)) {
    try {
      FlightLog file = read_flight_file(flight_file(state_.folder, other));
      if (is_of(file, other)) log = std::move(file);
    } catch (const Error&) {  // it has ended, and removed the file
    }
  }
  if (log.header.now_ns == 0) log = *peers_[static_cast<size_t>(other)].board;
  log.silent_seconds = silence(other);
  return log;
}

bool FlightWatch::Judge::answers(int other) const {
  const Peer& peer = peers_[static_cast<size_t>(other)];
  return other != state_.rank && peer.board && peer.board->header.left == 0 && !peer.deaf && silence(other) == 0;
}

std::vector<FlightLog> FlightWatch::Judge::collect(int alarm) {
  for (int other = 1; other < static_cast<int>(peers_.size()); ++other) {
    state_.store->deleteKey(record_key(alarm - 1, other));  // what came too late
  }
  state_.store->set(alarm_key(alarm), to_value("1"));
  std::map<int, FlightLog> logs;
  logs[state_.rank] = talk_.full_log();
  const auto end = Clock::now() + 3 * state_.interval() + 2 * kStackLimit;
  const auto outstanding = [&] {
    std::vector<int> left;
    for (int other = 1; other < static_cast<int>(peers_.size()); ++other) {
      if (answers(other) && !logs.contains(other)) left.push_back(other);
    }
    return left;
  };
  for (auto left = outstanding(); !left.empty() && Clock::now() < end; left = outstanding()) {
    talk_.show_board();  // others look whether rank 0 lives
    for (const int other : left) {
      if (!state_.store->check({record_key(alarm, other)})) continue;
      logs[other] = log_from_bytes(to_text(state_.store->get(record_key(alarm, other))), cat("rank ", other));
      state_.store->deleteKey(record_key(alarm, other));
    }
    if (!state_.pause(std::chrono::milliseconds(20))) break;
  }
  std::vector<FlightLog> all;
  for (int other = 0; other < static_cast<int>(peers_.size()); ++other) {
    if (logs.contains(other)) {
      all.push_back(std::move(logs[other]));
    } else if (peers_[static_cast<size_t>(other)].board) {
      all.push_back(unheard(other));
    }
  }
  return all;
}

std::string FlightWatch::Judge::write_records(const std::vector<FlightLog>& logs, const StallExplanation& stall,
                                              int alarm) {
  if (state_.folder.empty()) return "";
  const std::string to = stall_folder(state_.folder, alarm);
  std::error_code error;
  std::filesystem::create_directories(to, error);
  for (FlightLog log : logs) {
    talk_.show_board();  // the folder may be slow
    log.dead_after_seconds = state_.dead_after();
    classic_stream<std::ofstream>(flight_file(to, log.header.rank), std::ios::binary) << to_bytes(log);
  }
  auto summary = classic_stream<std::ofstream>(stall_summary(to));
  summary << stall.sentence << "\n\n";
  for (const FlightLog& log : logs) summary << rank_report(log, 5) << "\n";
  if (!summary.flush()) return cat(". The records could not be written to ", to);
  return cat(". Records: `ds-tool explain ", to, "`");
}

// The store may be in this process, which may end at once.
void FlightWatch::Judge::await_readers() {
  std::vector<std::string> keys;
  for (int other = 1; other < static_cast<int>(peers_.size()); ++other) {
    if (answers(other)) keys.push_back(read_key(other));
  }
  const auto end = Clock::now() + state_.interval() + kStackLimit;
  while (!keys.empty() && !state_.store->check(keys) && Clock::now() < end &&
         state_.pause(std::chrono::milliseconds(20))) {
  }
}

// `stalled`: a rank has waited for longer than the limit; else only what is hopeless is told.
void FlightWatch::Judge::raise_alarm(bool stalled) {
  const int alarm = ++alarms_;
  state_.recorder->keep();
  const std::vector<FlightLog> logs = collect(alarm);
  const StallExplanation stall = explain_stall(logs, static_cast<int>(peers_.size()), state_.dead_after());
  if (stall.cause == StallCause::kNone || (!stalled && !stall.hopeless())) return;
  const std::string text = stall.sentence + write_records(logs, stall, alarm);
  if (stall.hopeless()) {
    log::error(text);
  } else {
    log::warning(text);
  }
  next_report_ = std::max(state_.limit(), 2 * stall.seconds);
  if (!stall.hopeless()) return;
  state_.store->set(kVerdict, to_value(text));
  await_readers();
  state_.end(text);
}

}  // namespace ds::comm
