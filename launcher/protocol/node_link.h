// The host's end of the connection to the first ds-launch: orders come in on standard input, output and failures go out
// on standard output as messages.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/command_line/console.h"
#include "launcher/protocol/message.h"

namespace ds::launcher {

// The time of the steady clock in nanoseconds.
int64_t steady_nanoseconds();

// Puts the output of ranks and ds-launch into messages.
class NodeConsole : public Console {
 public:
  NodeConsole();  // says the greeting
  void raw(int stream, std::string_view bytes) override;
  void line(int stream, std::string_view text) override;
  void send(const Message& message);
};

// The stream of messages to and from the first ds-launch.
class NodeLink {
 public:
  using Clock = std::chrono::steady_clock;

  // Reads from `fd`, which the caller owns; answers clock messages on `console`.
  NodeLink(int fd, NodeConsole& console) : fd_(fd), console_(console) {}

  // Waits for the next order; none when the connection is gone.
  std::optional<Message> wait();
  // The orders that have come by `now`, without waiting. Sets lost() at the end of the stream, and when the silence has
  // lasted for too long.
  std::vector<Message> read(Clock::time_point now = Clock::now());
  void send(const Message& message) { console_.send(message); }

  int fd() const { return lost_ ? -1 : fd_; }
  bool lost() const { return lost_; }

  // Makes so many seconds of silence from now on count as a lost connection; 0: no limit. An order to stop the ranks
  // (SIGSTOP) suspends the limit until the next message.
  void limit_silence(double seconds, Clock::time_point now = Clock::now());
  std::optional<Clock::time_point> silence_deadline() const;  // when to call read()

 private:
  void take_bytes(Clock::time_point now);
  void check_silence(Clock::time_point now);
  std::optional<Message> next();

  int fd_;
  NodeConsole& console_;
  MessageReader reader_{true};
  bool lost_ = false, paused_ = false;
  double silence_limit_ = 0;
  Clock::time_point last_word_;
  bool was_away_ = false;  // since the last word, for too long to say who was silent
};

}  // namespace ds::launcher
