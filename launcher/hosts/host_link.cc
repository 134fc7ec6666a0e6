#include "launcher/hosts/host_link.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "core/system_call.h"
#include "launcher/processes/pipe.h"
#include "launcher/processes/rank_process.h"

namespace ds::launcher {
namespace {

pid_t start_link(const std::string& file, const std::vector<std::string>& words,
                 const std::vector<std::string>& environment, UniqueFd& in, UniqueFd& out, UniqueFd& err) {
  Pipe input = open_pipe(), output = open_pipe(), errors = open_pipe();
  require_system(input.valid() && output.valid() && errors.valid(), "connecting ssh: pipe");
  for (const Pipe* pipe : {&output, &errors}) fcntl(pipe->reader.get(), F_SETFL, O_NONBLOCK);
  const pid_t pid = start_rank({.file = file,
                                .words = words,
                                .environment = environment,
                                .stdin_fd = input.reader.get(),
                                .stdout_fd = output.writer.get(),
                                .stderr_fd = errors.writer.get(),
                                .cpus = {},
                                .hangup_ignored = true});  // as it is here
  in = std::move(input.writer);
  out = std::move(output.reader);
  err = std::move(errors.reader);
  return pid;
}

}  // namespace

HostLink::HostLink(const std::string& file, const std::vector<std::string>& words,
                   const std::vector<std::string>& environment)
    : queue_(-1) {
  pid_ = start_link(file, words, environment, in_, out_, err_);
  queue_ = OutputQueue(in_.get());
  running_ = true;
}

HostLink::~HostLink() {
  if (!running_) return;
  kill();
  waitpid(pid_, nullptr, 0);
}

void HostLink::send(const Message& message) {
  if (!in_.valid()) return;
  queue_.add(encode(message));
  queue_.write_some();
}

void HostLink::hang_up() {
  queue_ = OutputQueue(-1);
  in_.reset();
}

void HostLink::kill() {
  if (running_) ::kill(-pid_, SIGKILL);
}

void HostLink::append_waits(std::vector<pollfd>& waits, bool with_output) const {
  if (in_.valid() && !queue_.empty()) waits.push_back({.fd = in_.get(), .events = POLLOUT, .revents = 0});
  if (out_.valid() && with_output) waits.push_back({.fd = out_.get(), .events = POLLIN, .revents = 0});
  if (err_.valid()) waits.push_back({.fd = err_.get(), .events = POLLIN, .revents = 0});
}

bool HostLink::take_output() {
  char buffer[65536];
  const ssize_t got = ::read(out_.get(), buffer, sizeof(buffer));
  if (got > 0) reader_.feed({buffer, static_cast<size_t>(got)});
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) out_.reset();
  return got > 0;
}

void HostLink::take_errors() {
  char buffer[4096];
  while (err_.valid()) {
    const ssize_t got = ::read(err_.get(), buffer, sizeof(buffer));
    if (got > 0) {
      error_lines_.feed({buffer, static_cast<size_t>(got)}, [&](std::string_view line) { errors_.add(line); });
    } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    } else {
      err_.reset();
    }
  }
}

std::vector<Message> HostLink::read(bool with_output) {
  take_errors();
  if (out_.valid() && with_output) take_output();
  std::vector<Message> messages;
  while (std::optional<Message> message = reader_.next()) messages.push_back(std::move(*message));
  return messages;
}

bool HostLink::over() {
  if (running_ && waitpid(pid_, &status_, WNOHANG) == pid_) {
    running_ = false;
    hang_up();
  }
  if (running_) return false;
  // The last output of the process is in the pipe; whoever else holds its ends (a master connection of ssh) writes
  // none.
  while (out_.valid() && take_output()) {
  }
  take_errors();
  error_lines_.finish([&](std::string_view line) { errors_.add(line); });
  return true;
}

std::vector<std::string> HostLink::last_words() const {
  std::vector<std::string> words;
  for (std::string line : errors_.lines()) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (!line.empty()) words.push_back(std::move(line));
  }
  return words;
}

}  // namespace ds::launcher
