// Which of the hosts that were asked an elastic job runs on.
#pragma once

#include <vector>

#include "launcher/command_line/notices.h"
#include "launcher/command_line/options.h"
#include "launcher/hosts/host_member.h"
#include "launcher/program/own_program.h"

namespace ds::launcher {

struct Selection {
  bool enough = false;  // there are `least` of them
  std::vector<Host> unready;
};

// Leaves the first options.max_nodes hosts that are ready in `members`, and lets the others go. Says, at `level`, why
// hosts are not ready, and whether too few are; then `members` stay as they are.
Selection select_hosts(HostMembers& members, size_t least, const Options& options, const OwnProgram& own,
                       Verbosity level, Notices& notices);

}  // namespace ds::launcher
