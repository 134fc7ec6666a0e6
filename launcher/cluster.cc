#include "launcher/cluster.h"

#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "core/check.h"
#include "launcher/exit_cause.h"
#include "launcher/file_hash.h"
#include "launcher/forwarded_environment.h"
#include "launcher/handled_signals.h"
#include "launcher/node.h"
#include "launcher/node_link.h"
#include "launcher/pid_file.h"
#include "launcher/program_path.h"
#include "launcher/rank_environment.h"
#include "launcher/ssh_command.h"

namespace ds::launcher {
namespace {

constexpr int kHostLost = 255;     // what ssh itself ends with
constexpr double kEndSeconds = 5;  // for a host to say that its ranks have ended
constexpr double kAlivesInTimeout = 6;

std::chrono::steady_clock::duration in_seconds(double count) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(count));
}

std::string level_name(Verbosity verbosity) {
  switch (verbosity) {
    case Verbosity::kError:
      return "error";
    case Verbosity::kWarning:
      return "warning";
    case Verbosity::kInfo:
      return "info";
    case Verbosity::kDebug:
      return "debug";
  }
  return "info";
}

// The command line for the ds-launch of a host: what of this one's options concerns the ranks there.
std::vector<std::string> words_for_host(const Options& options) {
  std::vector<std::string> words = {"--standalone",
                                    "--log_level",
                                    level_name(options.verbosity),
                                    "--failure_grace",
                                    cat(options.failure_grace_seconds),
                                    "--signal_grace",
                                    cat(options.signal_grace_seconds)};
  const auto add = [&](const std::string& flag, const std::string& value) {
    words.push_back(flag);
    words.push_back(value);
  };
  if (options.master_port) add("--master_port", cat(*options.master_port));
  if (!options.rank_log_dir.empty()) add("--enable_each_rank_log", options.rank_log_dir);
  if (!options.bind_core_list.empty()) {
    std::string list;
    for (int core : options.bind_core_list) list += (list.empty() ? "" : ",") + cat(core);
    add("--bind_core_list", list);
  } else if (options.bind_cores) {
    words.emplace_back("--bind_cores_to_rank");
  }
  words.emplace_back("--");
  words.push_back(options.program);
  words.insert(words.end(), options.arguments.begin(), options.arguments.end());
  return words;
}

std::string find_ssh(const std::vector<std::string>& environment) {
  try {
    return find_program("ssh", environment_value(environment, "PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  } catch (const ProgramError&) {
    throw UsageError("many hosts need the program ssh, which is not in PATH: install it (Debian: openssh-client)");
  }
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

}  // namespace

Cluster::Cluster(std::vector<Host> hosts, const Options& options, std::vector<std::string> environment,
                 Console& console, Notices& notices)
    : options_(options),
      environment_(std::move(environment)),
      console_(console),
      notices_(notices),
      hangup_ignored_(is_hangup_ignored()),
      signals_(open_signals(hangup_ignored_)) {
  for (Host& host : hosts) members_.emplace_back().host = std::move(host);
}

int Cluster::run() {
  start_links();
  const Clock::time_point limit =
      Clock::now() + in_seconds(options_.connect_timeout_seconds + options_.check_timeout_seconds);
  while (!all_answered() && ending_signal_ == 0 && Clock::now() < limit) wait_for_something(limit);
  if (ending_signal_ != 0) {
    notices_.info("ended by SIG", sigabbrev_np(ending_signal_), " before a rank had started");
    return 128 + ending_signal_;  // the links end with this object
  }
  if (report_trouble()) {
    std::vector<HostAnswer> answers;
    for (const Member& member : members_) answers.push_back({member.host.name, member.reply, member.trouble});
    return exit_code_of(answers);
  }
  start_ranks();
  while (!all_over()) {
    wait_for_something(std::nullopt);
    enforce_deadline();
  }
  return report();
}

CheckRequest Cluster::request_for(size_t index) const {
  const Member& member = members_[index];
  const std::filesystem::path here = std::filesystem::current_path();
  const std::string home = environment_value(environment_, "HOME").value_or("/");
  return {.folder = here.string(),
          .host = member.host.name,
          .first = index == 0,
          .slots = member.host.slots,
          .master_addr = options_.master_addr,
          .link_timeout = options_.link_timeout_seconds,
          .pid_file = options_.save_pid ? pid_file_path() : "",
          .words = words_for_host(options_),
          .environment = forwarded_environment(environment_, home, here)};
}

void Cluster::start_links() {
  const std::string ssh = find_ssh(environment_);
  const std::string command = cat("exec ", shell_word(own_program()), ' ', kNodeFlag);
  const SshSettings settings{.port = options_.ssh_port,
                             .more_words = options_.launcher_args,
                             .connect_timeout = options_.connect_timeout_seconds,
                             .link_timeout = options_.link_timeout_seconds};
  for (size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    const CheckRequest request = request_for(i);
    member.link = std::make_unique<HostLink>(ssh, ssh_command(settings, member.host.name, command), environment_);
    notices_.debug("host ", member.host.name, ": ssh runs as pid ", member.link->pid());
    member.link->send(to_message(request));
  }
}

bool Cluster::all_answered() const {
  return std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.reply || m.over; });
}

bool Cluster::all_over() const {
  return std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.over; });
}

bool Cluster::report_trouble() const {
  std::vector<HostAnswer> answers;
  for (const Member& member : members_) {
    const std::string silent =
        cat("no answer within ", options_.connect_timeout_seconds + options_.check_timeout_seconds, " s",
            member.link->greeted() ? "; its ds-launch runs, but is slow to read the program: raise --check_timeout"
                                   : cat("; see whether `ssh ", member.host.name, " true` ends"));
    answers.push_back({member.host.name, member.reply, member.trouble.empty() ? silent : member.trouble});
  }
  const std::vector<std::string> lines = compare_answers(answers, file_hash(own_program()));
  if (lines.empty()) return false;
  notices_.error("nothing was started, because not all of the ", members_.size(), " hosts are ready:");
  for (const std::string& line : lines) notices_.error("  ", line);
  return true;
}

void Cluster::start_ranks() {
  StartRequest start{.nodes = static_cast<int>(members_.size()),
                     .master_addr = members_.front().reply->address,
                     .master_port = members_.front().reply->port};
  start.world_size = 0;
  for (const Member& member : members_) start.world_size += static_cast<int>(member.host.slots.size());
  for (Member& member : members_) {
    for (const std::string& note : member.reply->notes) notices_.info(member.host.name, ": ", note);
    for (int exchange = 0; exchange < 3; ++exchange) {
      member.link->send({.kind = MessageKind::kClock, .fields = {cat(steady_nanoseconds())}});
    }
    member.link->send(to_message(start));
    start.node += 1;
    start.first_rank += static_cast<int>(member.host.slots.size());
  }
  started_ = true;
  next_alive_ = Clock::now();
  notices_.info(start.world_size, " ranks of ", options_.program, " on ", start.nodes,
                start.nodes == 1 ? " host, " : " hosts, ", start.master_addr, ':', start.master_port);
}

void Cluster::wait_for_something(const std::optional<Clock::time_point>& limit) {
  keep_alive();
  std::optional<Clock::time_point> next = limit;
  const auto sooner = [&](const Clock::time_point& time) { next = next ? std::min(*next, time) : time; };
  if (deadline_) sooner(*deadline_);
  if (started_ && options_.link_timeout_seconds > 0) sooner(next_alive_);
  const double left = next ? std::chrono::duration<double, std::milli>(*next - Clock::now()).count() : -1;

  std::vector<pollfd> waits = {{.fd = signals_.get(), .events = POLLIN, .revents = 0}};
  console_.append_waits(waits);
  for (const Member& member : members_) {
    if (!member.over) member.link->append_waits(waits, !console_.backed_up());
  }
  poll(waits.data(), waits.size(), next ? static_cast<int>(std::ceil(std::clamp(left, 0.0, 3.6e6))) : -1);
  console_.write_some();
  for (Member& member : members_) {
    if (member.over) continue;
    member.link->write_some();
    read_from(member);
  }
  handle_signals();
}

void Cluster::handle_signals() {
  signalfd_siginfo info{};
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) handle_signal(static_cast<int>(info.ssi_signo));
}

void Cluster::handle_signal(int number) {
  if (number == SIGCHLD || number == SIGWINCH) return;
  if (number == SIGTSTP) return stop_and_continue();
  if (number == SIGINT && interrupted_once_) {
    notices_.warning("second SIGINT: killing the ranks on ", names([](const Member& m) { return !m.over; }));
    kill_sent_ = true;
    deadline_ = Clock::now() + in_seconds(kEndSeconds);
    return send_all({.kind = MessageKind::kKill, .fields = {"second SIGINT"}});
  }
  send_all({.kind = MessageKind::kSignal, .fields = {cat(number)}});
  if (number == SIGUSR1 || number == SIGUSR2) return;
  if (number == SIGINT) interrupted_once_ = true;
  if (ending_signal_ != 0 || failed_) return;
  ending_signal_ = number;
  if (!started_) return;
  const double grace = options_.signal_grace_seconds;
  if (grace > 0) deadline_ = Clock::now() + in_seconds(grace + kEndSeconds);
  notices_.info("SIG", sigabbrev_np(number), " passed on to all ranks; ",
                grace > 0 ? cat("they have ", grace, " s to end") : std::string("waiting for them to end"),
                ", a second SIGINT kills them");
}

void Cluster::stop_and_continue() {
  send_all({.kind = MessageKind::kSignal, .fields = {cat(SIGSTOP)}});
  kill(getpid(), SIGSTOP);
  send_all({.kind = MessageKind::kSignal, .fields = {cat(SIGCONT)}});  // here ds-launch goes on
}

void Cluster::keep_alive() {
  if (!started_ || options_.link_timeout_seconds <= 0 || Clock::now() < next_alive_) return;
  send_all({.kind = MessageKind::kAlive, .fields = {}});
  next_alive_ = Clock::now() + in_seconds(options_.link_timeout_seconds / kAlivesInTimeout);
}

void Cluster::read_from(Member& member) {
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

void Cluster::take(Member& member, const Message& message) {
  switch (message.kind) {
    case MessageKind::kChecked:
      member.reply = check_reply(message);
      break;
    case MessageKind::kClockAnswer:
      member.clock.take(number_field(message, 0), number_field(message, 1), steady_nanoseconds());
      break;
    case MessageKind::kBytes:
      console_.raw(number_field(message, 0) == Console::kErr ? Console::kErr : Console::kOut, message.fields.at(1));
      break;
    case MessageKind::kLine:
      console_.line(number_field(message, 0) == Console::kErr ? Console::kErr : Console::kOut, message.fields.at(1));
      break;
    case MessageKind::kFailure:
      member.failure = failure_message(message);
      on_failure(member);
      break;
    case MessageKind::kEnded:
      member.exit_code = static_cast<int>(number_field(message, 0));
      break;
    default:
      throw CommError("it sent an order, which only the first ds-launch gives");
  }
}

void Cluster::on_over(Member& member) {
  member.over = true;
  if (!started_) {
    if (member.trouble.empty()) member.trouble = why_over(member);
    member.reply.reset();
    return;
  }
  const int code = member.exit_code.value_or(kHostLost);
  if (member.failure || (member.exit_code && (code == 0 || failed_ || ending_signal_ != 0))) return;
  if (kill_sent_) return;
  const std::string cause = member.exit_code ? cat("its ds-launch ended with exit code ", code,
                                                   ", though no rank had failed: did someone end it?")
                                             : cat("the connection to it is gone: ", why_over(member));
  if (failed_ || ending_signal_ != 0) {
    notices_.warning("host ", member.host.name, ": ", cause);
    return;
  }
  member.failure = FailureMessage{.exit_code = code,
                                  .when = member.clock.there(steady_nanoseconds()),
                                  .lines = {cat("host ", member.host.name, ": ", cause)}};
  on_failure(member);
}

// The end of a host's ssh in words: what it said, and what to do.
std::string Cluster::why_over(const Member& member) const {
  if (!member.trouble.empty()) return member.trouble;
  const std::vector<std::string> said = member.link->last_words();
  const std::string words = said.empty() ? "" : cat(": ", joined(said));
  const int code = launcher::exit_code_of(member.link->status());
  const std::string try_it =
      cat("ssh ", options_.ssh_port ? cat("-p ", *options_.ssh_port, ' ') : "", member.host.name, " true");
  if (member.link->greeted() || WIFSIGNALED(member.link->status())) {
    const bool by_ssh = WIFSIGNALED(member.link->status()) || code == kHostLost;
    return cat(by_ssh ? "ssh: " : "ds-launch there: ", exit_words(member.link->status()), words,
               by_ssh ? "" : "; see whether someone ended it");
  }
  if (code == 127 || code == 126) {
    return cat("ds-launch does not run there as ", own_program(), " (exit code ", code, words,
               "); every host needs it, with the same path, for instance through a shared file system");
  }
  if (code == kHostLost) return cat("ssh cannot reach it", words, "; ", ssh_advice(said, try_it));
  return cat("ds-launch did not answer, exit code ", code, words, "; is it the same version?");
}

void Cluster::on_failure(Member& failed) {
  if (failed_ || ending_signal_ != 0) return;
  failed_ = true;
  deadline_ = Clock::now() + in_seconds(options_.failure_grace_seconds + kEndSeconds);
  const auto others = [](const Member& m) { return !m.over && !m.failure; };
  if (const std::string left = names(others); !left.empty()) {
    notices_.info("host ", failed.host.name, " failed: ending the ranks on ", left);
  }
  for (Member& member : members_) {
    if (others(member)) member.link->send({.kind = MessageKind::kEnd, .fields = {}});
  }
}

// A host that does not end: first its ranks are killed, then the connection is closed.
void Cluster::enforce_deadline() {
  if (!deadline_ || Clock::now() < *deadline_ || all_over()) return;
  const std::string left = names([](const Member& m) { return !m.over; });
  if (!std::exchange(kill_sent_, true)) {
    notices_.warning("not ended in time: killing the ranks on ", left);
    send_all({.kind = MessageKind::kKill, .fields = {"not ended in time"}});
    deadline_ = Clock::now() + in_seconds(kEndSeconds);
    return;
  }
  notices_.warning("no answer from ", left, ": closing the connection; ds-launch there ends the ranks when it notices",
                   options_.link_timeout_seconds > 0 ? cat(", within ", options_.link_timeout_seconds, " s") : "");
  forget_all();
  deadline_.reset();
}

void Cluster::send_all(const Message& message) {
  for (Member& member : members_) {
    if (!member.over) member.link->send(message);
  }
}

void Cluster::forget_all() {
  for (Member& member : members_) {
    if (!member.over) member.link->kill();
  }
}

std::string Cluster::names(bool (*which)(const Member&)) const {
  std::string text;
  for (const Member& member : members_) {
    if (which(member)) text += (text.empty() ? "" : ", ") + member.host.name;
  }
  return text;
}

const Cluster::Member* Cluster::first_failure() const {
  const Member* first = nullptr;
  const auto when = [](const Member& member) { return member.clock.here(member.failure->when); };
  for (const Member& member : members_) {
    if (member.failure && (first == nullptr || when(member) < when(*first))) first = &member;
  }
  return first;
}

int Cluster::report() const {
  if (ending_signal_ != 0) {
    const bool all_well =
        std::all_of(members_.begin(), members_.end(), [](const Member& m) { return m.exit_code == 0; });
    notices_.info("ended by SIG", sigabbrev_np(ending_signal_), all_well ? "; every rank ended well" : "");
    return all_well ? 0 : 128 + ending_signal_;
  }
  const Member* first = first_failure();
  if (first == nullptr) return 0;
  for (const std::string& line : first->failure->lines) notices_.error(line);
  return first->failure->exit_code;
}

}  // namespace ds::launcher
