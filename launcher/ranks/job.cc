#include "launcher/ranks/job.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/restart_request.h"
#include "core/system_call.h"
#include "launcher/processes/exit_cause.h"
#include "launcher/processes/handled_signals.h"
#include "launcher/processes/rank_process.h"
#include "launcher/ranks/failure_report.h"

namespace ds::launcher {
namespace {

constexpr double kSweepGraceSeconds = 1;

// Rank 0 may read a file or a pipe given to ds-launch; a terminal it may not, because only one process group can.
bool stdin_is_for_rank_zero() { return fcntl(STDIN_FILENO, F_GETFD) >= 0 && !isatty(STDIN_FILENO); }

}  // namespace

Job::Job(JobPlan plan, Console& console, Notices& notices)
    : plan_(std::move(plan)),
      console_(console),
      notices_(notices),
      guard_(std::make_unique<OrphanGuard>(plan_.launch_id)),
      relay_(console, static_cast<int>(plan_.environments.size()), plan_.rank_log_dir, plan_.first_rank, plan_.host),
      joined_(plan_.joined_files),
      hangup_ignored_(is_hangup_ignored()),
      ranks_(plan_.environments.size()),
      oom_before_(read_oom_counters()) {
  signals_ = open_signals(hangup_ignored_);
  exits_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  require_system(exits_.valid(), "epoll_create");
}

Job::~Job() {
  if (running_ > 0) {
    signal_ranks(SIGKILL);
    guard_->sweep(groups(), 0);
  }
}

int Job::run() {
  start_ranks();
  if (plan_.first != nullptr) plan_.first->on_ranks_started();
  while (running_ > 0) {
    wait_for_something();
    enforce_deadline();
  }
  clean_up();
  return report();
}

void Job::start_ranks() {
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  require_system(null.valid(), "/dev/null");
  for (size_t rank = 0; rank < ranks_.size(); ++rank) start_rank_of(static_cast<int>(rank), null.get());
}

void Job::start_rank_of(int rank, int null_fd) {
  const OutputRelay::RankEnds ends = relay_.connect(rank);
  const bool reads_input = rank + plan_.first_rank == 0 && plan_.first == nullptr && stdin_is_for_rank_zero();
  const UniqueFd input(fcntl(reads_input ? STDIN_FILENO : null_fd, F_DUPFD_CLOEXEC, 3));
  const auto index = static_cast<size_t>(rank);
  Rank& started = ranks_[index];
  started.pid = start_rank({.file = plan_.file,
                            .words = plan_.words,
                            .environment = plan_.environments[index],
                            .stdin_fd = input.get(),
                            .stdout_fd = ends.out.get(),
                            .stderr_fd = ends.err.get(),
                            .cpus = plan_.cpus.empty() ? std::vector<int>{} : plan_.cpus[index],
                            .hangup_ignored = hangup_ignored_});
  started.running = true;
  ++running_;
  guard_->watch(started.pid);
  notices_.debug("rank ", rank + plan_.first_rank, " runs as pid ", started.pid);
  started.pidfd = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, started.pid, 0)));
  require_system(started.pidfd.valid(), "pidfd_open (Linux 5.3 or later is needed)");
  epoll_event event{.events = EPOLLIN | EPOLLONESHOT, .data = {.u32 = static_cast<uint32_t>(rank)}};
  require_system(epoll_ctl(exits_.get(), EPOLL_CTL_ADD, started.pidfd.get(), &event) == 0, "epoll_ctl");
}

void Job::wait_for_something() {
  const FirstLauncher::Wait orders = plan_.first ? plan_.first->next_orders() : FirstLauncher::Wait{};
  std::vector<pollfd> waits = {{.fd = signals_.get(), .events = POLLIN, .revents = 0},
                               {.fd = exits_.get(), .events = POLLIN, .revents = 0},
                               {.fd = orders.fd, .events = POLLIN, .revents = 0}};
  const size_t first_output = waits.size();
  console_.append_waits(waits);
  const size_t first_source = waits.size();
  relay_.append_waits(waits);
  const bool woken = poll(waits.data(), waits.size(), deadline_.or_sooner(orders.until).poll_timeout_ms()) > 0;
  if (woken && waits[1].revents != 0) handle_exits();  // first: what failed before an order came is a failure
  if (plan_.first != nullptr) {
    for (const JobOrder& order : plan_.first->take_orders()) take_order(order);
  }
  if (!woken) return;
  if (waits[0].revents != 0) {
    while (const std::optional<int> number = next_signal(signals_)) handle_signal(*number);
  }
  if (first_output != first_source) console_.write_some();
  for (size_t i = first_source; i < waits.size(); ++i) relay_.handle(waits[i]);
  if (const std::string trouble = relay_.take_trouble(); !trouble.empty()) notices_.warning(trouble);
  if (!output_loss_said_ && console_.lost(Console::kOut)) {
    output_loss_said_ = true;
    notices_.warning("nobody reads standard output any more: the ranks go on, their output is dropped");
  }
}

void Job::handle_signal(int number) {
  if (number == SIGCHLD) return reap_others();
  if (number == SIGWINCH) {
    relay_.resize_terminals();
    if (ranks_[0].running) kill(-ranks_[0].pid, SIGWINCH);
    return;
  }
  switch (signal_policy_.take(number)) {
    case SignalMeaning::kNone:
      return;
    case SignalMeaning::kStop:
      return stop_together(SIGSTOP, [&](int sent) { signal_ranks(sent); });
    case SignalMeaning::kPassOn:
      return signal_ranks(number);
    case SignalMeaning::kEnd:
      return begin_to_end(number);
    case SignalMeaning::kKill:
      return kill_ranks("second SIGINT");
  }
}

void Job::begin_to_end(int number) {
  signal_ranks(number);
  if (ending_ != Ending::kNot) return;
  ending_ = Ending::kSignal;
  const double grace = plan_.signal_grace_seconds;
  if (grace > 0) deadline_ = Deadline::in(grace);
  notices_.say(own_level(), passed_on_text(number, "all ranks", grace));
}

// The first ds-launch says for all hosts what the user should know.
Verbosity Job::own_level() const { return plan_.first ? Verbosity::kDebug : Verbosity::kInfo; }

void Job::take_order(const JobOrder& order) {
  switch (order.kind) {
    case JobOrder::Kind::kSignal:
      return handle_signal(order.signal);
    case JobOrder::Kind::kEnd:
      return end_for_others("a rank of another host failed", Ending::kElsewhere);
    case JobOrder::Kind::kRestart:
      return ask_program_to_end();
    case JobOrder::Kind::kKill:
      if (running_ > 0 && !killed_) kill_ranks(order.why);
      return;
    case JobOrder::Kind::kLost:
      if (running_ > 0) end_for_others("the connection to the first ds-launch is gone, or silent", Ending::kFirstLost);
      return;
  }
}

// Where the file cannot be made, hosts are taken in at the next failure.
void Job::ask_program_to_end() {
  const UniqueFd file(open(plan_.restart_file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  restart_asked_ = file.valid();
  if (!restart_asked_) notices_.warning("cannot make ", plan_.restart_file, ": ", std::strerror(errno));
}

// Ends the ranks like a failure here does, but no failure of a rank counts from now on.
void Job::end_for_others(const std::string& why, Ending ending) {
  notices_.debug(why);
  if (ending_ == Ending::kNot) ending_ = ending;
  if (!killed_) deadline_ = deadline_.or_sooner(Deadline::in(plan_.failure_grace_seconds));
  signal_ranks(SIGTERM);
  signal_ranks(SIGCONT);
}

void Job::handle_exits() {
  std::vector<epoll_event> events(ranks_.size());
  const int count = epoll_wait(exits_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const int rank = static_cast<int>(events[static_cast<size_t>(i)].data.u32);
    const Rank& ended = ranks_[static_cast<size_t>(rank)];
    int status = 0;
    rusage usage{};
    if (ended.running && wait4(ended.pid, &status, WNOHANG, &usage) == ended.pid) {
      on_exit(rank, status, usage.ru_maxrss);
    }
  }
}

// Children that ranks left behind, so that no zombies pile up.
void Job::reap_others() {
  handle_exits();
  int status = 0;
  rusage usage{};
  for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
    const auto rank =
        std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.running && r.pid == pid; });
    if (rank != ranks_.end()) on_exit(static_cast<int>(rank - ranks_.begin()), status, usage.ru_maxrss);
  }
}

void Job::on_exit(int rank, int status, long peak_rss_kib) {
  Rank& ended = ranks_[static_cast<size_t>(rank)];
  ended.running = false;
  ended.status = status;
  ended.pidfd.reset();
  --running_;
  relay_.drain(rank);
  notices_.debug("rank ", rank + plan_.first_rank, " ended: ", exit_words(status));
  const bool for_restart = restart_asked_ && WIFEXITED(status) && WEXITSTATUS(status) == kRestartExitCode;
  if (for_restart && ending_ == Ending::kNot) {
    ending_ = Ending::kRestart;  // the others do the same
    deadline_ = Deadline::in(plan_.failure_grace_seconds);
  }
  if (status != 0 && ending_ == Ending::kNot) on_failure(rank, status, peak_rss_kib);
  if (status == 0 && ending_ == Ending::kNot && running_ > 0) tell_absence(rank);
  if (kill(-ended.pid, 0) != 0) guard_->forget(ended.pid);
}

void Job::on_failure(int rank, int status, long peak_rss_kib) {
  failure_ = Failure{.rank = rank + plan_.first_rank,
                     .host = plan_.host,
                     .pid = ranks_[static_cast<size_t>(rank)].pid,
                     .status = status,
                     .peak_rss_bytes = int64_t{peak_rss_kib} * 1024,
                     .before = oom_before_,
                     .after = read_oom_counters()};
  if (plan_.first != nullptr) plan_.first->tell_failure(exit_code_of(status), failure_lines());
  ending_ = Ending::kFailure;
  deadline_ = Deadline::in(plan_.failure_grace_seconds);
  if (running_ > 0) {
    notices_.info("rank ", rank + plan_.first_rank, " failed (",
                  WIFSIGNALED(status) ? cat("SIG", sigabbrev_np(WTERMSIG(status))) : exit_words(status), "): ending ",
                  rank_list_text(running_ranks()));
  }
  signal_ranks(SIGTERM);
  signal_ranks(SIGCONT);  // one that is stopped could not end
}

std::vector<std::string> Job::failure_lines() const {
  std::vector<std::string> lines = {cause_line(*failure_)};
  const auto append = [&](const std::vector<std::string>& more) {
    lines.insert(lines.end(), more.begin(), more.end());
  };
  append(last_lines_report(*failure_, relay_.last_lines(failure_->rank - plan_.first_rank)));
  append(flight_lines(plan_.flight_folder, plan_.host));
  return lines;
}

// The others would wait for it until their time limit.
void Job::tell_absence(int rank) const {
  if (joined_.has(static_cast<size_t>(rank)) || !joined_.any()) return;
  notices_.warning("rank ", rank + plan_.first_rank,
                   " has ended without a call of initialize() or init_distributed(); ",
                   "the ranks that have called it wait for this one: call it on every rank");
}

// Each rank trained a model of its own, and none of them noticed.
void Job::tell_no_meeting() const {
  if (ranks_.size() < 2 || plan_.first_rank != 0 || joined_.any() || !uses_dsengine(plan_.file)) return;
  notices_.warning("the program has never called initialize() or init_distributed(): each of the ", ranks_.size(),
                   " ranks ran all of it, alone");
}

void Job::enforce_deadline() {
  if (running_ == 0 || killed_ || !deadline_.passed()) return;
  const double grace = ending_ == Ending::kSignal ? plan_.signal_grace_seconds : plan_.failure_grace_seconds;
  kill_ranks(cat("not ended within ", grace, " s"));
}

void Job::kill_ranks(const std::string& why) {
  if (ending_ == Ending::kNot) ending_ = Ending::kSignal;
  killed_ = true;
  deadline_ = {};
  notices_.warning(why, ": killing ", rank_list_text(running_ranks()));
  signal_ranks(SIGKILL);
}

void Job::signal_ranks(int number) const {
  for (const Rank& rank : ranks_) {
    if (rank.running) kill(-rank.pid, number);
  }
}

std::vector<int> Job::running_ranks() const {
  std::vector<int> running;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].running) running.push_back(static_cast<int>(rank) + plan_.first_rank);
  }
  return running;
}

std::vector<pid_t> Job::groups() const {
  std::vector<pid_t> groups;
  for (const Rank& rank : ranks_) {
    if (rank.pid > 0) groups.push_back(rank.pid);
  }
  return groups;
}

void Job::clean_up() {
  if (restart_asked_) unlink(plan_.restart_file.c_str());
  const std::vector<std::string> left = guard_->sweep(groups(), killed_ ? 0 : kSweepGraceSeconds);
  if (!left.empty()) {
    std::string names = left.front();
    for (size_t i = 1; i < left.size(); ++i) names += ", " + left[i];
    notices_.info("ended processes that ranks had left behind: ", names);
  }
  relay_.drain_all();
  relay_.finish();
}

int Job::report() {
  int result = 0;
  if (failure_) {
    if (plan_.first == nullptr) {
      for (const std::string& line : failure_lines()) notices_.error(line);
    }
    result = exit_code_of(failure_->status);
  } else if (ending_ == Ending::kNot) {
    tell_no_meeting();
  } else if (ending_ == Ending::kRestart) {
    result = kRestartExitCode;
  } else if (ending_ == Ending::kSignal) {
    const bool all_well = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.status == 0; });
    const int number = signal_policy_.ending_signal();
    result = all_well ? 0 : 128 + number;
    if (number != 0) {  // else the first ds-launch had the ranks killed
      notices_.say(own_level(), "ended by SIG", sigabbrev_np(number), all_well ? "; every rank ended well" : "");
    }
  }
  return result;
}

}  // namespace ds::launcher
