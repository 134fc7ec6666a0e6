// Messages between two ds-launch processes over ssh's standard streams, and at an endpoint: a kind and a few fields of
// bytes.
//
// On the wire: 4 bytes length of what follows, 1 byte kind, then each field with 4 bytes length before it; integers are
// little endian. In front of the first message from a host stands kGreeting, because login scripts may print.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ds::launcher {

inline constexpr std::string_view kGreeting = "\nds-launch-node 1\n";

enum class MessageKind : uint8_t {
  // to a host
  kCheck,    // see node_protocol.h
  kClock,    // answered at once with the same field and the host's time
  kStart,    // see node_protocol.h
  kSignal,   // number: pass it on to the ranks
  kEnd,      // another host's rank failed: end the ranks, a failure is none any more
  kKill,     // reason: kill the ranks
  kAlive,    // the first ds-launch still runs
  kRestart,  // hosts are to be taken in: tell the program, which then ends with kRestartExitCode
  // from a host
  kChecked,
  kClockAnswer,
  kBytes,    // stream, bytes of rank 0
  kLine,     // stream, whole line
  kFailure,  // see node_protocol.h
  kEnded,    // exit code
  // at an endpoint, see endpoint_meeting.h
  kArrive,   // from a node: job, nodes, ranks, host
  kPlace,    // to it: node, first rank, ranks of all, port of rank 0, flight job
  kRefused,  // to it: why
};

struct Message {
  MessageKind kind = MessageKind::kAlive;
  std::vector<std::string> fields;

  bool operator==(const Message&) const = default;
};

// The bytes of the message on the wire.
std::string encode(const Message& message);

// Collects bytes and gives out whole messages. Pure.
class MessageReader {
 public:
  explicit MessageReader(bool greeted) : greeted_(greeted) {}

  void feed(std::string_view bytes);
  // The next whole message; none until more bytes come. Throws CommError for bytes that no ds-launch sends.
  std::optional<Message> next();
  bool greeted() const { return greeted_; }  // whether the other side has said that it is a ds-launch

 private:
  std::string bytes_;
  size_t begin_ = 0;
  bool greeted_;  // false: bytes before kGreeting are dropped
};

}  // namespace ds::launcher
