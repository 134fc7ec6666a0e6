// Chooses where a job runs: here, here as one of many hosts, or on hosts reached through ssh.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/command_line/host_list.h"
#include "launcher/command_line/options.h"

namespace ds::launcher {

struct HostChoice {
  enum class Mode {
    kHere,    // this machine only
    kByHand,  // this machine is hosts[node]; someone starts the others
    kSsh,     // all hosts, from here
    kMeet,    // this machine is one of several, which meet at an endpoint; someone starts the others
  };
  Mode mode = Mode::kHere;
  std::vector<Host> hosts;                // kByHand, kSsh
  std::optional<std::vector<int>> slots;  // kHere: set when the user named them
  int node = 0;                           // kByHand
};

// `local_slots`: slots of this machine, for --include or --exclude without a hostfile. Throws ConfigError or IoError
// naming the flag, host or line that is wrong.
HostChoice choose_where(const Options& options, int local_slots,
                        const std::string& default_hostfile = std::string(kDefaultHostfile));

// The hostfile or list of hosts that `options` or the default name; empty: there is none.
std::string hosts_of(const Options& options, const std::string& default_hostfile = std::string(kDefaultHostfile));

// Whether `host` is the machine this runs on. "user@host" never is: another user may be meant.
bool is_this_machine(const std::string& host);

}  // namespace ds::launcher
