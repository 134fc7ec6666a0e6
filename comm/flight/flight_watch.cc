#include "comm/flight/flight_watch.h"

#include <pthread.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <memory>
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

FlightWatch::Talk::Talk(State& state) : state_(state) {
  if (state_.rank == 0) judge_ = std::make_unique<Judge>(state_, *this);
}

void FlightWatch::Talk::run() {
  bool again = true;
  while (again) {
    try {
      do {
        state_.asked_ns = Clock::now().time_since_epoch().count();
        {
          const QuietStore quiet;  // rank 0 may end at any time
          exchange();
        }
        state_.asked_ns = 0;
        exchanged_ = Clock::now();
      } while (!state_.ending && !state_.closed && rest());
      const QuietStore quiet;
      if (!state_.ending && !state_.closed) say_goodbye();
      again = false;
    } catch (const std::exception& error) {
      state_.asked_ns = 0;
      again = reconnect(without_stack(error.what()));
    }
  }
}

// Sleeps until the next exchange, which comes soon where the rank is held up: it may wait in vain, and whoever waits
// has time. False: it is time to stop.
bool FlightWatch::Talk::rest() {
  const auto end = Clock::now() + state_.interval();
  const auto look = std::min(state_.interval(), std::max(kHeldUp, state_.shortest_interval()));
  do {
    if (!state_.pause(look)) return false;
  } while (Clock::now() < end && !state_.recorder->held_up_for(kHeldUp));
  return true;
}

// Whether to go on, on a new connection. Where there is none, the process with the store has most likely ended.
bool FlightWatch::Talk::reconnect(const std::string& why) {
  log::debug("flight watch: ", why);
  if (exchanged_ - connected_ > kSteady) reconnections_ = 0;
  for (int attempt = 0; attempt < kReconnections && state_.pause(state_.interval()); ++attempt) {
    try {
      const QuietStore quiet;
      state_.asked_ns = Clock::now().time_since_epoch().count();
      state_.store = connect(state_.meeting);
      state_.asked_ns = 0;
      connected_ = Clock::now();
      if (++reconnections_ <= kReconnections) return true;
      give_up(why);
      return false;
    } catch (const std::exception&) {
      state_.asked_ns = 0;
    }
  }
  state_.lost = true;
  return false;
}

// So that rank 0 does not take this rank for dead.
void FlightWatch::Talk::give_up(const std::string& why) {
  log::warning("stalls are not reported any more: the store of the rendezvous fails again and again: ", why);
  state_.deaf = true;
  try {
    const QuietStore quiet;
    state_.store->set(deaf_key(state_.rank), to_value("1"));
  } catch (const std::exception& error) {
    log::debug("flight watch: ", error.what());
  }
}

// The store may be in rank 0's process: it waits a little, so that nobody finds it closed.
void FlightWatch::Talk::say_goodbye() {
  show_board();
  state_.store->set(gone_key(state_.rank), to_value("1"));
  if (state_.rank != 0 || state_.recorder->log().header.left == 0) return;
  state_.store->set(kClosing, to_value("1"));
  std::vector<std::string> keys;
  for (size_t other = 1; other < state_.ranks.size(); ++other) keys.push_back(gone_key(static_cast<int>(other)));
  const auto end = Clock::now() + state_.interval() + kStackLimit;
  while (!state_.store->check(keys) && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

FlightLog FlightWatch::Talk::show_board() {
  state_.recorder->beat();
  FlightLog own = state_.recorder->log();
  state_.store->set(board_key(state_.rank), to_value(to_board(own)));
  return own;
}

void FlightWatch::Talk::exchange() {
  if (state_.was_stopped(last_turn_)) {
    quiet_until_ = last_turn_ + std::chrono::milliseconds(state_.limit_ms.load());
    first_heard_ = last_turn_;
    if (judge_) judge_->count_from(last_turn_);
  }
  const FlightLog own = show_board();
  if (judge_) {
    look_for_strangers();
    judge_->look();
  } else {
    if (state_.store->check({kClosing})) {
      state_.store->set(gone_key(state_.rank), to_value("1"));
      state_.closed = true;
      return;
    }
    listen_to_first(own);
    while (state_.store->check({alarm_key(alarms_seen_ + 1)})) answer(++alarms_seen_);
    if (state_.store->check({kVerdict})) obey(to_text(state_.store->get(kVerdict)));
  }
}

void FlightWatch::Talk::listen_to_first(const FlightLog& own) {
  const auto now = Clock::now();
  if (waiting_seconds(own) < state_.limit() / 4 || !state_.store->check({board_key(0)})) {
    first_heard_ = now;
    return;
  }
  const int64_t beat = log_from_bytes(to_text(state_.store->get(board_key(0))), board_key(0)).header.now_ns;
  if (beat != first_beat_) first_heard_ = now;
  first_beat_ = beat;
  state_.first_silent =
      Seconds(now - first_heard_).count() > state_.dead_after() && !state_.store->check({deaf_key(0)});
}

// Once: who comes again and again would fill the log.
void FlightWatch::Talk::look_for_strangers() {
  if (!state_.has_secret || stranger_told_) return;
  auto& inside =
      dynamic_cast<c10d::PrefixStore&>(*dynamic_cast<c10d::PrefixStore&>(*state_.store).getUnderlyingStore());
  const std::string stranger = take_stranger(*inside.getUnderlyingStore());
  if (stranger.empty()) return;
  stranger_told_ = true;
  log::warning("a process at ", stranger,
               " came to this job without its secret, and was not let in. This is said once");
}

// The stack of a rank that waits in a collective says nothing new.
FlightLog FlightWatch::Talk::full_log() {
  state_.recorder->beat();
  FlightLog log = state_.recorder->log();
  if (state_.stack && log.waiting() == nullptr) log.stack = state_.stack->frames(kStackLimit);
  for (size_t other = 0; other < state_.ranks.size(); ++other) {
    if (static_cast<int>(other) != state_.rank && state_.near(static_cast<int>(other))) {
      log.neighbours[static_cast<int>(other)] = state_of_process(state_.ranks[other].process);
    }
  }
  return log;
}

void FlightWatch::Talk::answer(int alarm) {
  state_.recorder->keep();
  state_.store->set(record_key(alarm, state_.rank), to_value(to_bytes(full_log())));
}

void FlightWatch::Talk::obey(const std::string& verdict) {
  try {
    state_.store->set(read_key(state_.rank), to_value("1"));
  } catch (const std::exception& error) {  // rank 0 has not waited
    log::debug("flight watch: ", error.what());
  }
  state_.end(verdict);
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
  state_->running = 2;
  const auto start = [this](void (*body)(State&)) {
    std::thread([state = state_, body] {
      pthread_setname_np(pthread_self(), "ds-watch");
      body(*state);
      const std::lock_guard lock(state->mutex);
      --state->running;
      state->changed.notify_all();
    }).detach();
  };
  start([](State& state) { Talk(state).run(); });
  start([](State& state) { Guard(state).run(); });
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
