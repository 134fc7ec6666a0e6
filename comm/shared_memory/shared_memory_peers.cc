#include "comm/shared_memory/shared_memory_peers.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "comm/meeting/process_state.h"
#include "core/check.h"

namespace ds::comm {
namespace {

uint64_t own_process_namespace() {
  struct stat info {};
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1000.0; }

}  // namespace

SharedMemoryPeers::SharedMemoryPeers(GroupMemory& memory, int rank, std::string group,
                                     std::chrono::milliseconds timeout, std::function<std::string()> verdict)
    : memory_(memory),
      rank_(rank),
      group_(std::move(group)),
      timeout_(timeout),
      verdict_(std::move(verdict)),
      spin_turns_(ds::comm::spin_turns(memory.size())),
      abandon_at_(Clock::time_point::max().time_since_epoch().count()) {
  RankBlock& own = memory_.rank(rank_);
  own.process.store(getpid());
  own.process_start.store(start_of_process(getpid()));
  own.process_namespace.store(own_process_namespace());
  own.state.store(RankState::kPresent);
}

void SharedMemoryPeers::await_step(uint32_t step, const OperationRecord& operation) {
  for (int peer = 0; peer < memory_.size(); ++peer) {
    if (peer == rank_) continue;
    const std::atomic<uint32_t>& value = memory_.rank(peer).progress.value;
    int turn = 0;
    while (!reached(value.load(std::memory_order_acquire), step) && turn < spin_turns_) {
      relax_core();
      ++turn;
    }
    if (turn == spin_turns_) sleep_until(peer, step, operation);
  }
}

void SharedMemoryPeers::sleep_until(int peer, uint32_t step, const OperationRecord& operation) {
  Signal& progress = memory_.rank(peer).progress;
  const Clock::time_point deadline = Clock::now() + timeout_;
  for (;;) {
    uint32_t seen = progress.value.load(std::memory_order_acquire);
    if (reached(seen, step)) return;
    progress.sleep(seen, kLook);
    if (reached(progress.value.load(std::memory_order_acquire), step)) return;
    for (int other = 0; other < memory_.size(); ++other) {
      if (other == rank_ || reached(memory_.rank(other).progress.value.load(std::memory_order_acquire), step)) continue;
      require_hope(other, operation);
    }
    require<CommError>(Clock::now() < deadline, group_, " rank ", rank_, ": ", operation, " timed out after ",
                       seconds(timeout_), " s; not arrived: ", lazy([&] { return missing(step); }));
  }
}

std::string SharedMemoryPeers::missing(uint32_t step) const {
  std::string text;
  for (int peer = 0; peer < memory_.size(); ++peer) {
    if (peer == rank_ || reached(memory_.rank(peer).progress.value.load(std::memory_order_acquire), step)) continue;
    text += cat(text.empty() ? "" : ", ", describe(peer));
  }
  return text;
}

void SharedMemoryPeers::give_up(const Printable& operation, const std::string& reason) const {
  throw CommError(cat(group_, " rank ", rank_, ": ", operation, " cannot finish: ", reason));
}

void SharedMemoryPeers::require_none_failed(const Printable& operation) const {
  for (int peer = 0; peer < memory_.size(); ++peer) {
    const RankBlock& block = memory_.rank(peer);
    if (peer != rank_ && block.state.load() == RankState::kFailed) {
      give_up(operation, cat("rank ", peer, " failed before: ", block.failure.load().text));
    }
  }
}

void SharedMemoryPeers::require_hope(int peer, const Printable& operation) const {
  if (const std::string verdict = verdict_(); !verdict.empty()) throw CommError(verdict);
  require_none_failed(operation);
  if (peer != rank_ && memory_.rank(peer).state.load() == RankState::kLeft) {
    give_up(operation, cat("rank ", peer, " has destroyed its communicator; ", describe(peer)));
  }
  if (dead(peer)) give_up(operation, describe(peer) + " has died");
  if (Clock::now().time_since_epoch().count() >= abandon_at_.load()) {
    give_up(operation, cat("this rank's communicator was destroyed while the operation was under way; waiting for ",
                           describe(peer)));
  }
}

bool SharedMemoryPeers::dead(int peer) const {
  const RankBlock& block = memory_.rank(peer);
  const int64_t process = block.process.load();
  if (peer == rank_ || process == 0 || process == memory_.rank(rank_).process.load()) return false;
  if (block.process_namespace.load() != memory_.rank(rank_).process_namespace.load()) return false;
  if (kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return true;
  return block.process_start.load() != 0 && start_of_process(process) != block.process_start.load();
}

std::string SharedMemoryPeers::describe(int peer) const {
  const RankBlock& block = memory_.rank(peer);
  if (block.state.load() == RankState::kAbsent) return cat("rank ", peer, " (has not joined)");
  std::string text = cat("rank ", peer, " (");
  if (memory_.between_processes()) {
    text += cat("process ", block.process.load(), dead(peer) ? ", no longer alive; " : ", alive; ");
  }
  const OperationRecord collective = block.operations[block.begun.load() % 2].load();
  const MessageRecord message = block.message.load();
  if (message.sequence == 0) return cat(text, "last began ", collective, ")");
  if (collective.sequence == 0) return cat(text, "last began ", message, ")");
  return cat(text, "last began ", collective, " and ", message, ")");
}

void SharedMemoryPeers::publish_failure(const std::string& text) {
  RankBlock& own = memory_.rank(rank_);
  if (own.state.load() == RankState::kFailed) return;
  FailureText failure;
  copy_text(failure.text, text);
  own.failure.store(failure);
  own.state.store(RankState::kFailed);
  own.progress.wake();
  for (int peer = 0; peer < memory_.size(); ++peer) memory_.rank(peer).bell.ring();
}

void SharedMemoryPeers::publish_departure() {
  RankState present = RankState::kPresent;
  RankBlock& own = memory_.rank(rank_);
  own.state.compare_exchange_strong(present, RankState::kLeft);
  own.progress.wake();
  for (int peer = 0; peer < memory_.size(); ++peer) memory_.rank(peer).bell.ring();
}

}  // namespace ds::comm
