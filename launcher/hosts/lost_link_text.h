// Words for a connection between hosts that has ended. The first host notices it in cluster.cc and tells the other
// hosts to end; the lost host notices it in launcher/protocol/node_link.cc and ends its ranks (node.cc).
#pragma once

#include <string>

#include "launcher/command_line/options.h"
#include "launcher/hosts/host_link.h"
#include "launcher/program/own_program.h"

namespace ds::launcher {

inline constexpr int kHostLostCode = 255;  // the exit code of ssh itself, and of ds-launch for a host that it lost

// The exit code of the ds-launch of a host that has ended its ranks because it lost the first one.
inline constexpr int kLinkLostCode = 254;

// Says why the connection ended, from the words of its ssh, and what to do. `member.link` is over.
std::string why_over(const HostMember& member, const Options& options, const OwnProgram& own);

}  // namespace ds::launcher
