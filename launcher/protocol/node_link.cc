#include "launcher/protocol/node_link.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

#include "core/check.h"
#include "launcher/command_line/seconds.h"
#include "launcher/protocol/node_protocol.h"

namespace ds::launcher {
namespace {

constexpr std::chrono::seconds kAway(2);  // for which a loop that works is never late

}  // namespace

int64_t steady_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

NodeConsole::NodeConsole() : Console(STDOUT_FILENO, STDOUT_FILENO) { put(kGreeting); }

void NodeConsole::raw(int stream, std::string_view bytes) {
  send({.kind = MessageKind::kBytes, .fields = {cat(stream), std::string(bytes)}});
}

void NodeConsole::line(int stream, std::string_view text) {
  send({.kind = MessageKind::kLine, .fields = {cat(stream), std::string(text)}});
}

void NodeConsole::send(const Message& message) { put(encode(message)); }

std::optional<Message> NodeLink::wait() {
  for (;;) {
    if (std::optional<Message> message = next()) return message;
    if (lost_) return std::nullopt;
    std::vector<pollfd> waits = {{.fd = fd_, .events = POLLIN, .revents = 0}};
    console_.append_waits(waits);
    poll(waits.data(), waits.size(), -1);
    console_.write_some();
    if (waits[0].revents != 0) take_bytes(Clock::now());
  }
}

std::vector<Message> NodeLink::read(Clock::time_point now) {
  if (!lost_) take_bytes(now);
  std::vector<Message> messages;
  while (std::optional<Message> message = next()) messages.push_back(std::move(*message));
  check_silence(now);  // after reading: what came while this thread was away is no silence
  return messages;
}

void NodeLink::take_bytes(Clock::time_point now) {
  char buffer[65536];
  pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
  while (poll(&ready, 1, 0) > 0) {
    const ssize_t got = ::read(fd_, buffer, sizeof(buffer));
    if (got > 0) {
      reader_.feed({buffer, static_cast<size_t>(got)});
      last_word_ = now;
      was_away_ = false;
    } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
      lost_ = true;
      return;
    }
  }
}

std::optional<Message> NodeLink::next() {
  while (std::optional<Message> message = reader_.next()) {
    paused_ = message->kind == MessageKind::kSignal && number_field(*message, 0) == SIGSTOP;
    if (message->kind == MessageKind::kAlive) continue;
    if (message->kind != MessageKind::kClock) return message;
    send({.kind = MessageKind::kClockAnswer, .fields = {message->fields.at(0), cat(steady_nanoseconds())}});
  }
  return std::nullopt;
}

void NodeLink::limit_silence(double seconds, Clock::time_point now) {
  silence_limit_ = seconds;
  last_word_ = now;
  was_away_ = false;
}

std::optional<NodeLink::Clock::time_point> NodeLink::silence_deadline() const {
  if (lost_ || paused_ || silence_limit_ <= 0) return std::nullopt;
  return last_word_ + in_seconds(silence_limit_);
}

// Who looks long after the deadline was away (stopped, or held up by a slow disk), and sshd beside it may have been
// too: the other side gets the whole time again, but once only.
void NodeLink::check_silence(Clock::time_point now) {
  const auto deadline = silence_deadline();
  if (!deadline || now < *deadline) return;
  if (now - *deadline > kAway && !std::exchange(was_away_, true)) {
    last_word_ = now;
  } else {
    lost_ = true;
  }
}

}  // namespace ds::launcher
