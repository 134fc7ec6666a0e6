#include "launcher/node_link.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "core/check.h"
#include "launcher/node_protocol.h"
#include "launcher/seconds.h"

namespace ds::launcher {

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
    if (waits[0].revents != 0) take_bytes();
  }
}

std::vector<Message> NodeLink::read() {
  if (!lost_) take_bytes();
  std::vector<Message> messages;
  while (std::optional<Message> message = next()) messages.push_back(std::move(*message));
  return messages;
}

void NodeLink::take_bytes() {
  char buffer[65536];
  pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
  while (poll(&ready, 1, 0) > 0) {
    const ssize_t got = ::read(fd_, buffer, sizeof(buffer));
    if (got > 0) {
      reader_.feed({buffer, static_cast<size_t>(got)});
      last_word_ = std::chrono::steady_clock::now();
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

void NodeLink::limit_silence(double seconds) {
  silence_limit_ = seconds;
  last_word_ = std::chrono::steady_clock::now();
}

std::optional<std::chrono::steady_clock::time_point> NodeLink::silence_deadline() const {
  if (lost_ || paused_ || silence_limit_ <= 0) return std::nullopt;
  return last_word_ + in_seconds(silence_limit_);
}

void NodeLink::check_silence() {
  const auto deadline = silence_deadline();
  if (deadline && std::chrono::steady_clock::now() >= *deadline) lost_ = true;
}

}  // namespace ds::launcher
