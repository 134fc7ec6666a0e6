// The address and port where rank 0 will listen, checked before anything starts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/unique_fd.h"

namespace ds::launcher {

inline constexpr int kDefaultMasterPort = 29500;

// Whether a process listens there, on any address of this machine; connections of the past do not count.
bool port_in_use(int port);

// Makes `socket` listen there on all addresses, of IPv4 and IPv6, that this machine has. Returns 0, or the error
// number: EADDRINUSE when another process listens.
int listen_on_all_interfaces(int port, UniqueFd& socket);

// Throws UsageError when `address` is a name that does not resolve, or an address that this machine does not have.
void require_own_address(const std::string& address);

// Whether a socket of this machine can be bound to it.
bool is_own_address(const std::string& address);

// An address of this machine that others can reach: the one to which ssh came (SSH_CONNECTION in `environment`), unless
// that is a loopback, else the first that is none, IPv4 before IPv6. Empty when there is none.
std::string outward_address(const std::vector<std::string>& environment);

struct MasterPort {
  int port = 0;
  bool replaced_default = false;  // 29500 was in use, `port` is a free one
};

// Chooses the port. `asked`: from the command line; UsageError when it is in use; absent: 29500, or a free port. Until
// this process ends no other ds-launch of this machine (network namespace) gets the same one unasked, though rank 0
// does not listen yet.
MasterPort choose_master_port(const std::optional<int>& asked);

}  // namespace ds::launcher
