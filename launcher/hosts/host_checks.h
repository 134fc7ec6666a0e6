// Compares the answers that the hosts of a job give before it starts. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/protocol/node_protocol.h"

namespace ds::launcher {

struct HostAnswer {
  std::string host;
  std::optional<CheckReply> reply;
  std::string no_reply_because;  // why there is no reply
};

// A line for each thing that is wrong, with the name of the host in front; empty: all is well. `launcher`: file_hash()
// of this ds-launch. A program that differs is told for the hosts that are not with the most, ties going to the first.
std::vector<std::string> compare_answers(const std::vector<HostAnswer>& answers, const std::string& launcher);

// The lines of compare_answers() for each host apart, without its name.
std::vector<std::vector<std::string>> troubles_of_hosts(const std::vector<HostAnswer>& answers,
                                                        const std::string& launcher);

// The exit code for ds-launch: that of the first host that could not run the program, else 2.
int exit_code_of(const std::vector<HostAnswer>& answers);

}  // namespace ds::launcher
