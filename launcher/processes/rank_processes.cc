#include "launcher/processes/rank_processes.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "core/system_call.h"

namespace ds::launcher {

RankProcesses::RankProcesses(const std::string& launch_id, size_t ranks)
    : guard_(launch_id), exits_(epoll_create1(EPOLL_CLOEXEC)), ranks_(ranks) {
  require_system(exits_.valid(), "epoll_create");
}

pid_t RankProcesses::start(int rank, const RankCommand& command) {
  Rank& started = ranks_[static_cast<size_t>(rank)];
  started.pid = start_rank(command);
  started.running = true;
  ++running_;
  guard_.watch(started.pid);
  started.pidfd = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, started.pid, 0)));
  require_system(started.pidfd.valid(), "pidfd_open (Linux 5.3 or later is needed)");
  epoll_event event{.events = EPOLLIN | EPOLLONESHOT, .data = {.u32 = static_cast<uint32_t>(rank)}};
  require_system(epoll_ctl(exits_.get(), EPOLL_CTL_ADD, started.pidfd.get(), &event) == 0, "epoll_ctl");
  return started.pid;
}

void RankProcesses::take_exits(const OnExit& on_exit) {
  std::vector<epoll_event> events(ranks_.size());
  const int count = epoll_wait(exits_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const size_t index = events[static_cast<size_t>(i)].data.u32;
    const Rank& ended = ranks_[index];
    int status = 0;
    rusage usage{};
    if (ended.running && wait4(ended.pid, &status, WNOHANG, &usage) == ended.pid) {
      record_exit(index, status, usage, on_exit);
    }
  }
}

void RankProcesses::reap_all(const OnExit& on_exit) {
  take_exits(on_exit);
  int status = 0;
  rusage usage{};
  for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
    const auto rank =
        std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.running && r.pid == pid; });
    if (rank != ranks_.end()) record_exit(static_cast<size_t>(rank - ranks_.begin()), status, usage, on_exit);
  }
}

void RankProcesses::record_exit(size_t index, int status, const rusage& usage, const OnExit& on_exit) {
  Rank& ended = ranks_[index];
  ended.running = false;
  ended.status = status;
  ended.pidfd.reset();
  --running_;
  on_exit({.rank = static_cast<int>(index), .pid = ended.pid, .status = status, .peak_rss_kib = usage.ru_maxrss});
  if (kill(-ended.pid, 0) != 0) guard_.forget(ended.pid);
}

std::vector<int> RankProcesses::running_ranks(int first_rank) const {
  std::vector<int> running;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].running) running.push_back(static_cast<int>(rank) + first_rank);
  }
  return running;
}

bool RankProcesses::all_ended_well() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.status == 0; });
}

void RankProcesses::signal_rank(int rank, int number) const {
  const Rank& receiver = ranks_[static_cast<size_t>(rank)];
  if (receiver.running) kill(-receiver.pid, number);
}

void RankProcesses::signal_all(int number) const {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) signal_rank(static_cast<int>(rank), number);
}

void RankProcesses::ask_to_end() const {
  signal_all(SIGTERM);
  signal_all(SIGCONT);  // one that is stopped could not end
}

std::vector<std::string> RankProcesses::sweep(double grace_seconds) {
  std::vector<pid_t> groups;
  for (const Rank& rank : ranks_) {
    if (rank.pid > 0) groups.push_back(rank.pid);
  }
  return guard_.sweep(groups, grace_seconds);
}

}  // namespace ds::launcher
