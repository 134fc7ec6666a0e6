#include "comm/flight/flight_watch.h"

#include <pthread.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <thread>

#include "comm/flight/flight_folder.h"
#include "comm/flight/flight_watch_state.h"
#include "comm/meeting/debug_level.h"
#include "comm/meeting/process_state.h"
#include "comm/meeting/quiet_store.h"
#include "comm/meeting/strangers.h"
#include "core/check.h"
#include "core/flight_job.h"
#include "core/log.h"
#include "core/without_stack.h"

namespace ds::comm {

using namespace flight;

namespace {

constexpr int kReconnections = 3;

// A file would grow with every heartbeat.
bool carries_heartbeats(const c10::intrusive_ptr<c10d::Store>& store) {
  c10d::Store* bare = store.get();
  while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(bare)) {
    bare = prefixed->getUnderlyingNonPrefixStore().get();
  }
  return dynamic_cast<c10d::TCPStore*>(bare) != nullptr || dynamic_cast<c10d::HashStore*>(bare) != nullptr;
}

c10::intrusive_ptr<c10d::Store> connect(const c10::intrusive_ptr<c10d::Store>& meeting) {
  return c10::make_intrusive<c10d::PrefixStore>("flight", meeting->clone());
}

}  // namespace

bool FlightWatch::State::pause(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex);
  changed.wait_for(lock, time, [this] { return stopping; });
  return !stopping;
}

bool FlightWatch::State::was_stopped(Clock::time_point& last) const {
  const auto now = Clock::now();
  const bool stopped = now - last > 5 * interval() + std::chrono::seconds(1);
  last = now;
  return stopped;
}

void FlightWatch::State::talk() {
  bool again = true;
  while (again) {
    try {
      do {
        asked_ns = Clock::now().time_since_epoch().count();
        {
          const QuietStore quiet;  // rank 0 may end at any time
          exchange();
        }
        asked_ns = 0;
        exchanged = Clock::now();
      } while (!ending && !closed && pause(interval()));
      const QuietStore quiet;
      if (!ending && !closed) say_goodbye();
      again = false;
    } catch (const std::exception& error) {
      asked_ns = 0;
      again = reconnect(without_stack(error.what()));
    }
  }
}

// Whether to go on, on a new connection. Where there is none, the process with the store has most likely ended.
bool FlightWatch::State::reconnect(const std::string& why) {
  log::debug("flight watch: ", why);
  if (exchanged - connected > kSteady) reconnections = 0;
  for (int attempt = 0; attempt < kReconnections && pause(interval()); ++attempt) {
    try {
      const QuietStore quiet;
      asked_ns = Clock::now().time_since_epoch().count();
      store = connect(meeting);
      asked_ns = 0;
      connected = Clock::now();
      if (++reconnections <= kReconnections) return true;
      give_up(why);
      return false;
    } catch (const std::exception&) {
      asked_ns = 0;
    }
  }
  lost = true;
  return false;
}

// So that rank 0 does not take this rank for dead.
void FlightWatch::State::give_up(const std::string& why) {
  log::warning("stalls are not reported any more: the store of the rendezvous fails again and again: ", why);
  deaf = true;
  try {
    const QuietStore quiet;
    store->set(deaf_key(rank), to_value("1"));
  } catch (const std::exception& error) {
    log::debug("flight watch: ", error.what());
  }
}

// The store may be in rank 0's process: it waits a little, so that nobody finds it closed.
void FlightWatch::State::say_goodbye() {
  show_board();
  store->set(gone_key(rank), to_value("1"));
  if (rank != 0 || recorder->log().header.left == 0) return;
  store->set(kClosing, to_value("1"));
  std::vector<std::string> keys;
  for (size_t other = 1; other < ranks.size(); ++other) keys.push_back(gone_key(static_cast<int>(other)));
  const auto end = Clock::now() + interval() + kStackLimit;
  while (!store->check(keys) && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

FlightLog FlightWatch::State::show_board() {
  recorder->beat();
  FlightLog own = recorder->log();
  store->set(board_key(rank), to_value(to_board(own)));
  return own;
}

void FlightWatch::State::exchange() {
  if (was_stopped(last_turn)) {
    quiet_until = last_turn + std::chrono::milliseconds(limit_ms.load());
    first_heard = last_turn;
    for (Peer& peer : peers) peer.heard = last_turn;
  }
  const FlightLog own = show_board();
  if (rank == 0) {
    look_for_strangers();
    read_boards();
    judge();
  } else {
    if (store->check({kClosing})) {
      store->set(gone_key(rank), to_value("1"));
      closed = true;
      return;
    }
    listen_to_first(own);
    while (store->check({alarm_key(alarms_seen + 1)})) answer(++alarms_seen);
    if (store->check({kVerdict})) obey(to_text(store->get(kVerdict)));
  }
}

// Once: who comes again and again would fill the log.
void FlightWatch::State::look_for_strangers() {
  if (!has_secret || stranger_told) return;
  auto& inside = dynamic_cast<c10d::PrefixStore&>(*dynamic_cast<c10d::PrefixStore&>(*store).getUnderlyingStore());
  const std::string stranger = take_stranger(*inside.getUnderlyingStore());
  if (stranger.empty()) return;
  stranger_told = true;
  log::warning("a process at ", stranger,
               " came to this job without its secret, and was not let in. This is said once");
}

// The stack of a rank that waits in a collective says nothing new.
FlightLog FlightWatch::State::full_log() {
  recorder->beat();
  FlightLog log = recorder->log();
  if (stack && log.waiting() == nullptr) log.stack = stack->frames(kStackLimit);
  for (size_t other = 0; other < ranks.size(); ++other) {
    if (static_cast<int>(other) != rank && near(static_cast<int>(other))) {
      log.neighbours[static_cast<int>(other)] = state_of_process(ranks[other].process);
    }
  }
  return log;
}

void FlightWatch::State::answer(int alarm) {
  recorder->keep();
  store->set(record_key(alarm, rank), to_value(to_bytes(full_log())));
}

void FlightWatch::State::obey(const std::string& verdict) {
  try {
    store->set(read_key(rank), to_value("1"));
  } catch (const std::exception& error) {  // rank 0 has not waited
    log::debug("flight watch: ", error.what());
  }
  end(verdict);
}

void FlightWatch::State::guard() {
  while (pause(interval() / 2)) {
    try {
      if (!ending) judge_alone();
    } catch (const std::exception& error) {
      log::warning("flight watch: ", error.what());
    }
    if (!ending) continue;
    const auto more = rank == 0 ? interval() : std::chrono::milliseconds(0);  // others read the verdict in its store
    if (!pause(kGrace + more)) return;
    if (!end_process) {
      log::error("this rank does not end by itself, and is left as it is: flight_recorder.end_process is false");
      return;
    }
    log::error("this rank does not end by itself, so it is ended, with exit code ", kExitCode);
    _exit(kExitCode);
  }
}

void FlightWatch::State::end(const std::string& text) {
  recorder->keep();
  recorder->doom(text);
  ending = true;
}

namespace {

std::string job_name(const RankPlace& first) {
  const char* const given = std::getenv(kFlightJobVariable);
  if (given != nullptr && *given != '\0') return given;
  return cat(first.host_name, "-", first.process, "-", std::time(nullptr));
}

struct JobRecord {
  std::string job;
  std::string folder;  // empty: none, the record is in memory
  std::shared_ptr<FlightRecorder> recorder;
};

JobRecord record_in_memory(FlightRecorderOptions options, const std::string& job, const char* why) {
  log::warning("the flight record stays in memory: ", why);
  options.file.clear();
  return {.job = job, .recorder = std::make_shared<FlightRecorder>(options)};
}

// Throws FlightFileInUse.
JobRecord record_in_folder(FlightRecorderOptions options, const std::string& base, const std::string& job) {
  constexpr int kAttempts = 3;  // a rank that ends takes the folder away when it is empty
  for (int attempt = 1;; ++attempt) {
    const std::string folder = make_flight_folder(base, job);
    if (!folder.empty()) options.file = flight_file(folder, options.rank);
    // No other rank of this job has made its file yet.
    require<FlightFileInUse>(options.rank != 0 || folder.empty() || !holds_records(folder), folder,
                             ": holds flight records of another start of a job");
    try {
      return {.job = job, .folder = folder, .recorder = std::make_shared<FlightRecorder>(options)};
    } catch (const FlightFileInUse&) {
      throw;
    } catch (const IoError& error) {
      if (attempt == kAttempts) return record_in_memory(options, job, error.what());
    }
  }
}

// Rank 0 names the job, as the environment says. Where a program starts several jobs, all inherit that name, and the
// first has it; nor is the folder of a start that failed taken over.
JobRecord record_of_first(const FlightRecorderOptions& options, const std::string& base, const RankPlace& own) {
  constexpr int kNames = 100;
  const std::string given = job_name(own);
  std::string job = given;
  for (int number = 2;; ++number) {
    try {
      return record_in_folder(options, base, job);
    } catch (const FlightFileInUse& error) {
      if (number > kNames) return record_in_memory(options, job, error.what());
    }
    job = cat(given, "-", own.host_name, "-", own.process, "-", number);
  }
}

JobRecord record_of_other(const FlightRecorderOptions& options, const std::string& base, const std::string& job) {
  try {
    return record_in_folder(options, base, job);
  } catch (const FlightFileInUse& error) {
    return record_in_memory(options, job, error.what());
  }
}

}  // namespace

FlightWatch::FlightWatch(const Rendezvous& meeting, Communicator& world, const FlightWatchOptions& options)
    : meeting_(meeting.store) {
  const bool watches = carries_heartbeats(meeting.store);
  const RankPlace& own = meeting.ranks[static_cast<size_t>(meeting.rank)];
  const FlightRecorderOptions recording{
      .rank = meeting.rank, .world_size = meeting.world_size, .host = own.host_name, .entries = options.entries};
  c10::intrusive_ptr<c10d::Store> store;
  JobRecord record;
  try {
    const QuietStore quiet;
    store = connect(meeting.store);
    if (meeting.rank == 0) {
      record = record_of_first(recording, options.folder, own);
      store->set(kJob, to_value(record.job));
    } else {
      record = record_of_other(recording, options.folder, to_text(store->get(kJob)));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError(cat("flight recorder: the store of the rendezvous does not answer: ", without_stack(error.what()),
                        ". A rank has most likely ended: look at the logs of the other ranks first"));
  }
  recorder_ = record.recorder;
  world.observe_with(recorder_);
  if (!watches) {
    log::info("stalls are not reported: ranks that meet in a file have no side channel. Meet by env:// or tcp://");
    return;
  }
  state_ = std::make_shared<State>();
  state_->meeting = meeting.store;
  state_->store = store;
  state_->has_secret = meeting.has_secret;
  state_->recorder = recorder_;
  state_->ranks = meeting.ranks;
  state_->rank = meeting.rank;
  state_->folder = record.folder;
  state_->limit_ms = options.stall_limit.count();
  state_->end_process = options.end_process;
  if (options.stacks) state_->stack.emplace();
  if (meeting.rank == 0) state_->peers.resize(meeting.ranks.size());
  state_->running = 2;
  for (void (State::*const body)() : {&State::talk, &State::guard}) {
    std::thread([state = state_, body] {
      pthread_setname_np(pthread_self(), "ds-watch");
      (*state.*body)();
      const std::lock_guard lock(state->mutex);
      --state->running;
      state->changed.notify_all();
    }).detach();
  }
}

FlightWatch::~FlightWatch() {
  if (std::uncaught_exceptions() == 0) {
    stop();
    return;
  }
  recorder_->keep();
  if (!state_) return;
  const std::lock_guard lock(state_->mutex);
  state_->stopping = true;  // others are to see at once that this rank ends
  state_->changed.notify_all();
}

void FlightWatch::stop() {
  if (state_ && state_->stopping) return;
  recorder_->leave();
  recorder_->stop();
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(2), [this] { return state_->running == 0; });
  if (ended) state_->recorder.reset();  // its file goes with the last who has it
}

void FlightWatch::set_stall_limit(std::chrono::milliseconds limit) {
  if (state_) state_->limit_ms = limit.count();
}

void FlightWatch::set_end_process(bool end_process) {
  if (state_) state_->end_process = end_process;
}

void watch_flight(const Rendezvous& meeting, Communicator& world, const FlightWatchOptions& options) {
  if (meeting.world_size == 1) return;
  FlightWatchOptions chosen = options;
  constexpr uint32_t kDetailed = 16384;
  if (debug_level(process_environment) == DebugLevel::kDetail) chosen.entries = std::max(chosen.entries, kDetailed);
  world.keep_watch(std::make_shared<FlightWatch>(meeting, world, chosen));
}

}  // namespace ds::comm
