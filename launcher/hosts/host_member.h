// One host of a job as the first ds-launch knows it, from the question whether it is ready to its exit code.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/host_list.h"
#include "launcher/hosts/host_link.h"
#include "launcher/protocol/clock_difference.h"
#include "launcher/protocol/node_protocol.h"

namespace ds::launcher {

struct HostMember {
  Host host;
  std::unique_ptr<HostLink> link;
  std::optional<CheckReply> reply;
  std::string trouble;  // why there is no reply
  ClockDifference clock;
  std::optional<FailureMessage> failure;
  std::optional<int> exit_code;
  bool answers_since_kill = false;  // its ds-launch waits for ranks that were killed
  bool over = false;                // its ssh has ended
};

using HostMembers = std::vector<HostMember>;

}  // namespace ds::launcher
