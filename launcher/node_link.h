// The host's end of the connection to the first ds-launch: orders come in on standard input, output and failures go out
// on standard output as messages.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/console.h"
#include "launcher/message.h"

namespace ds::launcher {

int64_t steady_nanoseconds();

// Puts what ranks and ds-launch say into messages.
class NodeConsole : public Console {
 public:
  NodeConsole();  // says the greeting
  void raw(int stream, std::string_view bytes) override;
  void line(int stream, std::string_view text) override;
  void send(const Message& message);
};

class NodeLink {
 public:
  // Reads from `fd`, which the caller owns; answers clock messages on `console`.
  NodeLink(int fd, NodeConsole& console) : fd_(fd), console_(console) {}

  // Waits for the next order; none when the connection is gone.
  std::optional<Message> wait();
  // The orders that have come, without waiting. Sets lost() at the end of the stream.
  std::vector<Message> read();
  void send(const Message& message) { console_.send(message); }

  int fd() const { return lost_ ? -1 : fd_; }
  bool lost() const { return lost_; }

  // From now on so many seconds of silence count as a lost connection; 0: no limit. An order to stop the ranks
  // (SIGSTOP) suspends the limit until the next message.
  void limit_silence(double seconds);
  std::optional<std::chrono::steady_clock::time_point> silence_deadline() const;
  void check_silence();

 private:
  void take_bytes();
  std::optional<Message> next();

  int fd_;
  NodeConsole& console_;
  MessageReader reader_{true};
  bool lost_ = false, paused_ = false;
  double silence_limit_ = 0;
  std::chrono::steady_clock::time_point last_word_;
};

}  // namespace ds::launcher
