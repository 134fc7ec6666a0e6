// The contents of the longer messages between ds-launch processes. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launcher/protocol/message.h"

namespace ds::launcher {

// The first thing that a host hears: what it will be asked to run, for it to look whether it can.
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

struct CheckReply {
  std::string launcher_hash, program_hash;  // file_hash()
  std::string program;                      // the file that was found
  std::string address;                      // of the first host: where rank 0 can be reached
  int port = 0;                             // of the first host
  int exit_code = 0;                        // not 0: it cannot run the ranks
  std::vector<std::string> problems;        // why
  std::vector<std::string> notes;           // for the user, all the same
};

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

// Throw CommError when the message has another shape.
CheckRequest check_request(const Message& message);
CheckReply check_reply(const Message& message);
StartRequest start_request(const Message& message);
FailureMessage failure_message(const Message& message);

// A field that is a number. Throws CommError.
int64_t number_field(const Message& message, size_t index);

}  // namespace ds::launcher
