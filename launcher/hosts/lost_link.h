// Why the connection to a host has ended, in words.
#pragma once

#include <string>

#include "launcher/command_line/options.h"
#include "launcher/hosts/host_member.h"
#include "launcher/program/own_program.h"

namespace ds::launcher {

inline constexpr int kHostLostCode = 255;  // what ssh itself ends with, and ds-launch for a host that it lost

// What the ds-launch of a host ends with when it has ended its ranks because it lost the first one.
inline constexpr int kLinkLostCode = 254;

// What its ssh said, and what to do. `member.link` is over.
std::string why_over(const HostMember& member, const Options& options, const OwnProgram& own);

}  // namespace ds::launcher
