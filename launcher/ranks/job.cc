#include "launcher/ranks/job.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <string_view>

#include "core/check.h"
#include "core/files/mapped_file.h"
#include "core/restart_request.h"
#include "core/system_call.h"
#include "launcher/processes/exit_cause.h"
#include "launcher/processes/handled_signals.h"
#include "launcher/ranks/failure_report.h"

namespace ds::launcher {
namespace {

constexpr double kSweepGraceSeconds = 1;
// The time that the rank which failed first has to end, after another has told of it: it may have much to destroy.
constexpr double kOwnErrorSeconds = 3;

// Rank 0 may read a file or a pipe given to ds-launch; a terminal it may not, because only one process group can.
bool stdin_is_for_rank_zero() { return fcntl(STDIN_FILENO, F_GETFD) >= 0 && !isatty(STDIN_FILENO); }

// The first ds-launch says for all hosts what the user should know.
Verbosity own_level(const JobPlan& plan) { return plan.first ? Verbosity::kDebug : Verbosity::kInfo; }

Failure failure_of(const RankExit& ended, const JobPlan& plan, const OomCounters& before) {
  return {.rank = ended.rank + plan.first_rank,
          .host = plan.host,
          .pid = ended.pid,
          .status = ended.status,
          .peak_rss_bytes = int64_t{ended.peak_rss_kib} * 1024,
          .before = before,
          .after = read_oom_counters()};
}

}  // namespace

JoinedRanks::~JoinedRanks() {
  for (const std::string& file : files_) unlink(file.c_str());
}

bool JoinedRanks::has(size_t rank) const { return rank < files_.size() && access(files_[rank].c_str(), F_OK) == 0; }

bool JoinedRanks::any() const {
  return std::any_of(files_.begin(), files_.end(),
                     [](const std::string& file) { return access(file.c_str(), F_OK) == 0; });
}

bool uses_dsengine(const std::string& file) {
  // In two parts, so that ds-launch itself does not hold the word.
  const std::string library = cat("lib", "dsengine");
  try {
    const MappedFile program(file);
    const auto bytes = program.bytes();
    return std::search(bytes.begin(), bytes.end(),
                       std::boyer_moore_horspool_searcher(library.begin(), library.end())) != bytes.end();
  } catch (const IoError&) {
    return false;
  }
}

Job::Job(JobPlan plan, Console& console, Notices& notices)
    : plan_(std::move(plan)),
      console_(console),
      notices_(notices),
      processes_(plan_.launch_id, plan_.environments.size()),
      relay_(console, static_cast<int>(plan_.environments.size()), plan_.rank_log_dir, plan_.first_rank, plan_.host),
      joined_(plan_.joined_files),
      hangup_ignored_(is_hangup_ignored()),
      oom_before_(read_oom_counters()) {
  signals_ = open_signals(hangup_ignored_);
}

Job::~Job() {
  if (processes_.any_running()) {
    processes_.signal_all(SIGKILL);
    processes_.sweep(0);
  }
}

int Job::run() {
  start_ranks();
  if (plan_.first != nullptr) plan_.first->on_ranks_started();
  while (processes_.any_running()) {
    wait_for_something();
    enforce_deadline();
  }
  clean_up();
  return report();
}

void Job::start_ranks() {
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  require_system(null.valid(), "/dev/null");
  for (size_t index = 0; index < plan_.environments.size(); ++index) {
    const int rank = static_cast<int>(index);
    const OutputRelay::RankEnds ends = relay_.connect(rank);
    const bool reads_input = rank + plan_.first_rank == 0 && plan_.first == nullptr && stdin_is_for_rank_zero();
    const UniqueFd input(fcntl(reads_input ? STDIN_FILENO : null.get(), F_DUPFD_CLOEXEC, 3));
    const pid_t pid = processes_.start(rank, {.file = plan_.file,
                                              .words = plan_.words,
                                              .environment = plan_.environments[index],
                                              .stdin_fd = input.get(),
                                              .stdout_fd = ends.out.get(),
                                              .stderr_fd = ends.err.get(),
                                              .cpus = plan_.cpus.empty() ? std::vector<int>{} : plan_.cpus[index],
                                              .hangup_ignored = hangup_ignored_});
    notices_.debug("rank ", rank + plan_.first_rank, " runs as pid ", pid);
  }
}

void Job::wait_for_something() {
  const FirstLauncher::Wait orders = plan_.first ? plan_.first->next_orders() : FirstLauncher::Wait{};
  std::vector<pollfd> waits = {{.fd = signals_.get(), .events = POLLIN, .revents = 0},
                               {.fd = processes_.exits_fd(), .events = POLLIN, .revents = 0},
                               {.fd = orders.fd, .events = POLLIN, .revents = 0}};
  const size_t first_output = waits.size();
  console_.append_waits(waits);
  const size_t first_source = waits.size();
  relay_.append_waits(waits);
  const Deadline limit = deadline_.or_sooner(orders.until).or_sooner(decided_at_.value_or(Deadline()));
  const bool woken = poll(waits.data(), waits.size(), limit.poll_timeout_ms()) > 0;
  if (woken && waits[1].revents != 0) {  // first: what failed before an order came is a failure
    processes_.take_exits([&](const RankExit& ended) { on_exit(ended); });
  }
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
  if (number == SIGCHLD) return processes_.reap_all([&](const RankExit& ended) { on_exit(ended); });
  if (number == SIGWINCH) {
    relay_.resize_terminals();
    return processes_.signal_rank(0, SIGWINCH);
  }
  switch (signal_policy_.take(number)) {
    case SignalMeaning::kNone:
      return;
    case SignalMeaning::kStop:
      return stop_together(SIGSTOP, [&](int sent) { processes_.signal_all(sent); });
    case SignalMeaning::kPassOn:
      return processes_.signal_all(number);
    case SignalMeaning::kEnd:
      return begin_to_end(number);
    case SignalMeaning::kKill:
      return kill_ranks("second SIGINT");
  }
}

void Job::begin_to_end(int number) {
  processes_.signal_all(number);
  if (ending_ != Ending::kNot) return;
  ending_ = Ending::kSignal;
  const double grace = plan_.signal_grace_seconds;
  if (grace > 0) deadline_ = Deadline::in(grace);
  notices_.say(own_level(plan_), passed_on_text(number, "all ranks", grace));
}

void Job::take_order(const JobOrder& order) {
  switch (order.kind) {
    case JobOrder::Kind::kSignal:
      return handle_signal(order.signal);
    case JobOrder::Kind::kEnd:
      return end_for_others("a rank of another host failed", Ending::kElsewhere);
    case JobOrder::Kind::kRestart:
      return ask_program_to_end();
    case JobOrder::Kind::kKill:
      if (processes_.any_running() && !killed_) kill_ranks(order.why);
      return;
    case JobOrder::Kind::kLost:
      if (processes_.any_running()) {
        end_for_others("the connection to the first ds-launch is gone, or silent", Ending::kFirstLost);
      }
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
  if (decided_at_) {  // the failure elsewhere came first, as this one said
    decided_at_.reset();
    failure_.reset();
    ending_ = ending;
  }
  if (ending_ == Ending::kNot) ending_ = ending;
  if (!killed_) deadline_ = deadline_.or_sooner(Deadline::in(plan_.failure_grace_seconds));
  processes_.ask_to_end();
}

void Job::on_exit(const RankExit& ended) {
  const int rank = ended.rank;
  const int status = ended.status;
  relay_.drain(rank);
  notices_.debug("rank ", rank + plan_.first_rank, " ended: ", exit_words(status));
  const bool for_restart = restart_asked_ && WIFEXITED(status) && WEXITSTATUS(status) == kRestartExitCode;
  if (for_restart && ending_ == Ending::kNot) {
    ending_ = Ending::kRestart;  // the others do the same
    deadline_ = Deadline::in(plan_.failure_grace_seconds);
  }
  if (status != 0 && (ending_ == Ending::kNot || (decided_at_ && !signal_policy_.asked_to_end()))) on_failure(ended);
  if (status == 0 && ending_ == Ending::kNot && processes_.any_running()) tell_absence(rank);
}

// See Note [Who failed first].
void Job::on_failure(const RankExit& ended) {
  const bool said_why = WIFEXITED(ended.status) || WTERMSIG(ended.status) == SIGABRT;  // and was not killed
  const bool follows = said_why && tells_of_another_rank(relay_.last_lines(ended.rank));
  if (!decided_at_ || !follows) failure_ = failure_of(ended, plan_, oom_before_);
  ending_ = Ending::kFailure;
  if (follows && processes_.any_running()) {
    if (!decided_at_) decided_at_ = Deadline::in(std::min(kOwnErrorSeconds, plan_.failure_grace_seconds));
    return;
  }
  end_for_failure();
}

// Ends the other ranks: it is decided which failure is to blame.
void Job::end_for_failure() {
  decided_at_.reset();
  const int status = failure_->status;
  if (plan_.first != nullptr) plan_.first->tell_failure(exit_code_of(status), failure_lines());
  deadline_ = Deadline::in(plan_.failure_grace_seconds);
  if (processes_.any_running()) {
    notices_.info("rank ", failure_->rank, " failed (",
                  WIFSIGNALED(status) ? cat("SIG", sigabbrev_np(WTERMSIG(status))) : exit_words(status), "): ending ",
                  rank_list_text(processes_.running_ranks(plan_.first_rank)));
  }
  processes_.ask_to_end();
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
  if (plan_.environments.size() < 2 || plan_.first_rank != 0 || joined_.any() || !uses_dsengine(plan_.file)) return;
  notices_.warning("the program has never called initialize() or init_distributed(): each of the ",
                   plan_.environments.size(), " ranks ran all of it, alone");
}

void Job::enforce_deadline() {
  if (decided_at_ && (decided_at_->passed() || !processes_.any_running())) end_for_failure();
  if (!processes_.any_running() || killed_ || !deadline_.passed()) return;
  const double grace = ending_ == Ending::kSignal ? plan_.signal_grace_seconds : plan_.failure_grace_seconds;
  kill_ranks(cat("not ended within ", grace, " s"));
}

void Job::kill_ranks(const std::string& why) {
  if (ending_ == Ending::kNot) ending_ = Ending::kSignal;
  killed_ = true;
  deadline_ = {};
  notices_.warning(why, ": killing ", rank_list_text(processes_.running_ranks(plan_.first_rank)));
  processes_.signal_all(SIGKILL);
}

void Job::clean_up() {
  if (restart_asked_) unlink(plan_.restart_file.c_str());
  const std::vector<std::string> left = processes_.sweep(killed_ ? 0 : kSweepGraceSeconds);
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
    const bool all_well = processes_.all_ended_well();
    const int number = signal_policy_.ending_signal();
    result = all_well ? 0 : 128 + number;
    if (number != 0) {  // else the first ds-launch had the ranks killed
      notices_.say(own_level(plan_), "ended by SIG", sigabbrev_np(number), all_well ? "; every rank ended well" : "");
    }
  }
  return result;
}

}  // namespace ds::launcher
