// The contents of the longer messages between ds-launch processes, and the clock difference that short ones measure.
// Pure.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "launcher/protocol/message.h"

namespace ds::launcher {

// The first message to a host: what it will be asked to run, so that it can check whether it can.
struct CheckRequest {
  std::string folder;              // where to run
  std::string host;                // its name in the hostfile
  bool first = false;              // rank 0 will be here: address and port concern this host
  std::vector<int> slots;          // one rank for each
  std::string master_addr;         // empty: the host says an address of its own
  double link_timeout = 0;         // seconds without a word from the first ds-launch until the ranks are ended; 0: none
  std::string pid_file;            // empty: none
  std::vector<std::string> words;  // command line: flags of ds-launch, "--", the program and its arguments
  std::vector<std::string> environment;  // entries to set over the login's
};

// The answer to a CheckRequest.
struct CheckReply {
  std::string launcher_hash, program_hash;  // file_hash()
  std::string program;                      // the file that was found
  std::string address;                      // of the first host: where rank 0 can be reached
  int port = 0;                             // of the first host
  int exit_code = 0;                        // not 0: the host cannot run the ranks
  std::vector<std::string> problems;        // why the host cannot run the ranks
  std::vector<std::string> notes;           // for the user, though all is well
};

// The order to start the ranks.
struct StartRequest {
  int node = 0, nodes = 1;
  int first_rank = 0, world_size = 1;
  std::string master_addr;
  int master_port = 0;
};

// The first failure on a host.
struct FailureMessage {
  int exit_code = 0;
  int64_t when = 0;                // nanoseconds, of the host's steady clock
  std::vector<std::string> lines;  // the cause, then the rank's last lines
};

Message to_message(const CheckRequest& request);
Message to_message(const CheckReply& reply);
Message to_message(const StartRequest& request);
Message to_message(const FailureMessage& failure);

// The contents of a message. Throw CommError when it has another shape.
CheckRequest check_request(const Message& message);
CheckReply check_reply(const Message& message);
StartRequest start_request(const Message& message);
FailureMessage failure_message(const Message& message);

// The value of a field that is a number. Throws CommError when it is none.
int64_t number_field(const Message& message, size_t index);

// The time by which another host's steady clock is ahead of ours, from questions and answers.
class ClockDifference {
 public:
  // Takes an answer: asked and received at these times of our clock, answered at that time of the other one;
  // nanoseconds. The answer with the shortest way there and back counts: it is wrong by half of that at most.
  void take(int64_t asked, int64_t answered, int64_t received) {
    if (received - asked >= round_trip_) return;
    round_trip_ = received - asked;
    ahead_ = answered - (asked + round_trip_ / 2);
  }

  // The time of our clock when the other one shows `there`, and the other way round.
  int64_t here(int64_t there) const { return there - ahead_; }
  int64_t there(int64_t here) const { return here + ahead_; }

 private:
  int64_t round_trip_ = std::numeric_limits<int64_t>::max();
  int64_t ahead_ = 0;
};

}  // namespace ds::launcher
