#include "launcher/hosts/cluster.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "core/restart_request.h"
#include "launcher/hosts/host_start.h"
#include "launcher/hosts/lost_link_text.h"
#include "launcher/processes/handled_signals.h"
#include "launcher/protocol/node_link.h"

namespace ds::launcher {
namespace {

constexpr double kEndSeconds = 5;  // for a host to say that its ranks have ended, or that it is there
constexpr double kAlivesInTimeout = 6;
constexpr double kQuietSeconds = 4;  // before the start, until hosts that have not answered are named

bool all_answered(const HostMembers& members) {
  return std::all_of(members.begin(), members.end(), [](const HostMember& m) { return m.reply || m.over; });
}

bool is_there(const HostMember& member) { return !member.over; }

bool all_over(const HostMembers& members) { return std::none_of(members.begin(), members.end(), is_there); }

// The names of the members that `which` holds for, as "a, b"; empty: there are none.
std::string names_of(const HostMembers& members, bool (*which)(const HostMember&)) {
  std::string text;
  for (const HostMember& member : members) {
    if (which(member)) text += (text.empty() ? "" : ", ") + member.host.name;
  }
  return text;
}

void send_to_all(HostMembers& members, const Message& message) {
  for (HostMember& member : members) {
    if (is_there(member)) member.link->send(message);
  }
}

void pass_signal_on(HostMembers& members, int number) {
  send_to_all(members, {.kind = MessageKind::kSignal, .fields = {cat(number)}});
}

// The member whose ranks failed first, by one clock; null: none has failed. See Note [Who failed first, among hosts].
const HostMember* first_failure(const HostMembers& members) {
  const HostMember* first = nullptr;
  const auto when = [](const HostMember& member) { return member.clock.here(member.failure->when); };
  for (const HostMember& member : members) {
    if (member.failure && (first == nullptr || when(member) < when(*first))) first = &member;
  }
  return first;
}

}  // namespace

Cluster::Cluster(StartHosts hosts, const Options& options, std::vector<std::string> environment, JobDeps job,
                 Console& console, Notices& notices)
    : options_(options),
      environment_(std::move(environment)),
      own_(job.own),
      intervals_(job.intervals),
      console_(console),
      notices_(notices),
      hangup_ignored_(is_hangup_ignored()),
      signals_(open_signals(hangup_ignored_)),
      hosts_(std::move(hosts)),
      away_(options_, environment_, job.own, job.intervals, notices_) {
  for (const Host& host : hosts_.asked) members_.emplace_back().host = host;
  for (const Host& host : hosts_.away) away_.add(host);
}

int Cluster::run() {
  ask_hosts(members_, options_, environment_, own_, notices_);
  const Deadline limit = Deadline::in(options_.connect_timeout_seconds + options_.check_timeout_seconds);
  const Deadline quiet_until = Deadline::in(kQuietSeconds).or_sooner(limit);
  bool named = false;
  while (!all_answered(members_) && ending_signal_ == 0 && !limit.passed()) {
    wait_for_something(named ? limit : quiet_until);
    if (named || all_answered(members_) || !quiet_until.passed()) continue;
    named = true;
    report_unanswered(members_, options_, notices_);
  }
  if (ending_signal_ != 0) {
    notices_.info("ended by SIG", sigabbrev_np(ending_signal_), " before a rank had started");
    return 128 + ending_signal_;  // the links end with this object
  }
  if (!ready_to_start()) return exit_code_of_trouble(members_);
  order_start(members_, options_, notices_);
  for (const HostMember& member : members_) intervals_.on_used(member.host.name);
  started_ = true;
  next_alive_ = Deadline::in(0);
  while (!all_over(members_)) {
    wait_for_something({});
    enforce_deadline();
  }
  return report();
}

bool Cluster::ready_to_start() {
  if (!options_.min_nodes && hosts_.first_start) return !report_trouble(members_, options_, own_, notices_);
  const Selection selection = select_hosts(members_, hosts_.least, options_, own_, hosts_.trouble_level, notices_);
  for (const Host& host : selection.unready) away_.add(host);
  return selection.enough;
}

void Cluster::wait_for_something(const Deadline& limit) {
  keep_alive();
  Deadline next = limit.or_sooner(deadline_);
  if (started_ && options_.link_timeout_seconds > 0) next = next.or_sooner(next_alive_);
  if (lacks_hosts()) next = next.or_sooner(away_.next_time());

  std::vector<pollfd> waits = {{.fd = signals_.get(), .events = POLLIN, .revents = 0}};
  console_.append_waits(waits);
  for (const HostMember& member : members_) {
    if (!member.over) member.link->append_waits(waits, !console_.backed_up());
  }
  if (lacks_hosts()) away_.append_waits(waits);
  poll(waits.data(), waits.size(), next.poll_timeout_ms());
  console_.write_some();
  // Before looking which ssh has ended: one that ends later wakes the next poll.
  while (const std::optional<int> number = next_signal(signals_)) handle_signal(*number);
  for (HostMember& member : members_) {
    if (member.over) continue;
    member.link->write_some();
    read_from(member);
  }
  if (lacks_hosts()) look_for_returned_hosts();
}

// Whether the job runs with fewer hosts than it may.
bool Cluster::lacks_hosts() const {
  const size_t most = options_.max_nodes ? static_cast<size_t>(*options_.max_nodes) : members_.size() + 1;
  return started_ && options_.min_nodes && members_.size() < most && !failed_ && !restart_begun_ && ending_signal_ == 0;
}

void Cluster::look_for_returned_hosts() {
  const std::vector<std::string> ready = away_.look(members_.front().reply->program_hash);
  if (ready.empty()) return;
  for (const std::string& name : ready) {
    notices_.warning("host ", name, " is ready: it is taken in after the next checkpoint, or at the next restart");
  }
  if (!std::exchange(restart_asked_, true)) send_to_all(members_, {.kind = MessageKind::kRestart, .fields = {}});
}

void Cluster::handle_signal(int number) {
  switch (signal_policy_.take(number)) {
    case SignalMeaning::kNone:
      return;
    case SignalMeaning::kStop:
      return stop_together(SIGSTOP, [&](int sent) { pass_signal_on(members_, sent); });
    case SignalMeaning::kPassOn:
      return pass_signal_on(members_, number);
    case SignalMeaning::kEnd:
      return begin_to_end(number);
    case SignalMeaning::kKill:
      notices_.warning("second SIGINT: killing the ranks on ", names_of(members_, is_there));
      return kill_ranks("second SIGINT");
  }
}

void Cluster::begin_to_end(int number) {
  pass_signal_on(members_, number);
  if (failed_) {
    notices_.info("SIG", sigabbrev_np(number), " passed on to the ranks that are left; they are not started again");
    return;
  }
  ending_signal_ = number;
  if (!started_) return;
  const double grace = options_.signal_grace_seconds;
  if (grace > 0) deadline_ = Deadline::in(grace + kEndSeconds);
  notices_.info(passed_on_text(number, "all ranks", grace));
}

void Cluster::keep_alive() {
  if (!started_ || options_.link_timeout_seconds <= 0 || !next_alive_.passed()) return;
  send_to_all(members_, {.kind = MessageKind::kAlive, .fields = {}});
  next_alive_ = Deadline::in(options_.link_timeout_seconds / kAlivesInTimeout);
}

void Cluster::read_from(HostMember& member) {
  try {
    for (const Message& message : member.link->read(!console_.backed_up())) take(member, message);
    if (!member.link->over()) return;
    for (const Message& message : member.link->read(true)) take(member, message);
  } catch (const CommError& error) {
    member.trouble = error.what();
    member.link->kill();
    if (!member.link->over()) return;
  }
  on_over(member);
}

void Cluster::take(HostMember& member, const Message& message) {
  switch (message.kind) {
    case MessageKind::kChecked:
      member.reply = check_reply(message);
      break;
    case MessageKind::kClockAnswer:
      member.clock.take(number_field(message, 0), number_field(message, 1), steady_nanoseconds());
      member.answers_since_kill = kill_sent_.has_value();
      break;
    case MessageKind::kBytes:
      console_.raw(number_field(message, 0) == Console::kErr ? Console::kErr : Console::kOut, message.fields.at(1));
      break;
    case MessageKind::kLine:
      console_.line(number_field(message, 0) == Console::kErr ? Console::kErr : Console::kOut, message.fields.at(1));
      break;
    case MessageKind::kFailure:
      if (ended_for_restart(member, failure_message(message).exit_code) || restart_begun_) break;
      member.failure = failure_message(message);
      on_failure(member);
      break;
    case MessageKind::kEnded:
      member.exit_code = static_cast<int>(number_field(message, 0));
      ended_for_restart(member, *member.exit_code);
      break;
    default:
      throw CommError("it sent an order, which only the first ds-launch gives");
  }
}

// Whether the program has ended because it was asked to.
bool Cluster::ended_for_restart(HostMember& member, int code) {
  if (!restart_asked_ || code != kRestartExitCode || failed_) return false;
  if (!std::exchange(restart_begun_, true)) {
    notices_.debug("host ", member.host.name, ": the program has ended for a restart");
    deadline_ = Deadline::in(options_.failure_grace_seconds + kEndSeconds);
  }
  return true;
}

void Cluster::on_over(HostMember& member) {
  member.over = true;
  if (!started_) {
    if (member.trouble.empty()) member.trouble = why_over(member, options_, own_);
    member.reply.reset();
    return;
  }
  const int code = member.exit_code.value_or(kHostLostCode);
  const bool expected = failed_ || restart_begun_ || ending_signal_ != 0;
  if (member.failure || (member.exit_code && (code == 0 || expected))) return;
  if (kill_sent_) return;
  const std::string cause = member.exit_code ? cat("its ds-launch ended with exit code ", code,
                                                   ", though no rank had failed: did someone end it?")
                                             : cat("the connection to it is gone: ", why_over(member, options_, own_));
  if (expected) {
    notices_.warning("host ", member.host.name, ": ", cause);
    return;
  }
  member.failure = FailureMessage{.exit_code = code,
                                  .when = member.clock.there(steady_nanoseconds()),
                                  .lines = {cat("host ", member.host.name, ": ", cause)}};
  on_failure(member);
}

void Cluster::on_failure(HostMember& failed) {
  if (failed_ || ending_signal_ != 0) return;
  failed_ = true;
  deadline_ = Deadline::in(options_.failure_grace_seconds + kEndSeconds);
  const auto others = [](const HostMember& m) { return !m.over && !m.failure; };
  if (const std::string left = names_of(members_, others); !left.empty()) {
    notices_.info("host ", failed.host.name, " failed: ending the ranks on ", left);
  }
  for (HostMember& member : members_) {
    if (others(member)) member.link->send({.kind = MessageKind::kEnd, .fields = {}});
  }
}

// Hosts that do not end: first their ranks are killed, then the connections are closed.
void Cluster::enforce_deadline() {
  if (!deadline_.passed() || all_over(members_)) return;
  if (kill_sent_) return close_links();
  notices_.warning("not ended in time: killing the ranks on ", names_of(members_, is_there));
  kill_ranks("not ended in time");
}

void Cluster::kill_ranks(const std::string& why) {
  send_to_all(members_, {.kind = MessageKind::kKill, .fields = {why}});
  send_to_all(members_, {.kind = MessageKind::kClock, .fields = {cat(steady_nanoseconds())}});
  kill_sent_ = Deadline::Clock::now();
  deadline_ = Deadline::in(kEndSeconds, *kill_sent_);
}

// See Note [Ranks that die slowly]. Where no ranks start again, nobody has to wait for the old ones.
void Cluster::close_links() {
  const double most = std::max(options_.link_timeout_seconds, kEndSeconds);
  const Deadline limit = Deadline::in(most, *kill_sent_);
  const bool last = signal_policy_.asked_to_end() || limit.passed();
  const auto is_slow = [](const HostMember& m) { return !m.over && m.answers_since_kill; };
  const auto is_silent = [](const HostMember& m) { return !m.over && !m.answers_since_kill; };
  if (const std::string silent = names_of(members_, is_silent); !silent.empty()) {
    notices_.warning("no answer from ", silent,
                     ": closing the connection; ds-launch there ends the ranks when it notices",
                     options_.link_timeout_seconds > 0 ? cat(", within ", options_.link_timeout_seconds, " s") : "");
  }
  if (const std::string slow = names_of(members_, is_slow); !slow.empty()) {
    notices_.warning("killed ranks on ", slow, " have not died yet: ",
                     last ? "closing the connection" : cat("waiting for them, ", most, " s in all"));
  }
  for (HostMember& member : members_) {
    if (is_silent(member) || (last && is_slow(member))) member.link->kill();
  }
  deadline_ = last ? Deadline() : limit;
}

Cluster::Outcome Cluster::outcome() const {
  if (signal_policy_.asked_to_end()) return Outcome::kEnded;
  if (!started_) return Outcome::kNotReady;
  const bool lost = std::any_of(members_.begin(), members_.end(), [](const HostMember& m) { return !m.exit_code; });
  if (first_failure(members_) != nullptr) return lost ? Outcome::kHostLost : Outcome::kRankFailed;
  return restart_begun_ ? Outcome::kHostsReturned : Outcome::kEnded;
}

std::set<std::string> Cluster::away() const {
  const std::vector<std::string> names = away_.still_away();
  std::set<std::string> away(names.begin(), names.end());
  for (const HostMember& member : members_) {
    if (started_ && !member.exit_code) away.insert(member.host.name);
  }
  return away;
}

int Cluster::report() const {
  if (ending_signal_ != 0) {
    const bool all_well =
        std::all_of(members_.begin(), members_.end(), [](const HostMember& m) { return m.exit_code == 0; });
    notices_.info("ended by SIG", sigabbrev_np(ending_signal_), all_well ? "; every rank ended well" : "");
    return all_well ? 0 : 128 + ending_signal_;
  }
  const HostMember* first = first_failure(members_);
  if (first == nullptr) return restart_begun_ ? kRestartExitCode : 0;
  for (const std::string& line : first->failure->lines) notices_.error(line);
  return first->failure->exit_code;
}

}  // namespace ds::launcher
