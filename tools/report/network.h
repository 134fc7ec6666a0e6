// Network interfaces, and which of them gloo and NCCL would take.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/meeting/environment_reader.h"
#include "tools/report/section.h"

namespace ds::tool::report {

struct Interface {
  std::string name;
  std::vector<std::string> addresses;  // IPv4 first
  std::string state;                   // "up", "down", "unknown" (as loopbacks and tunnels say)
  std::optional<int64_t> mbits;        // link speed; absent where the driver does not tell
  int64_t mtu = 0;
};

// The interfaces in the kernel's order. `root` is prepended to /sys/class/net; addresses are those of this process's
// network.
std::vector<Interface> read_interfaces(const std::filesystem::path& root = "/");
// Reads state, speed and MTU of an interface from /sys/class/net. Pure but for the files.
Interface link_facts(const std::string& name, const std::filesystem::path& root);

// A choice among the interfaces, and the reason.
struct Choice {
  std::vector<std::string> names;  // empty: none
  std::string reason;
};

// Reads environment variables; an absent or empty one is not set.
using Variables = comm::EnvironmentReader;

// The interface that comm/backends/factory.cc and comm/gloo/gloo_backend.cc choose between hosts. `own_address`:
// returns the address from which this host reaches a given one; "" where it cannot be told. Pure.
Choice gloo_choice(const std::vector<Interface>& interfaces, const Variables& variables,
                   const std::function<std::string(const std::string&)>& own_address);
// The interfaces that NCCL's src/misc/socket.cc chooses: NCCL_SOCKET_IFNAME ("eth,ib", "=eth0", "^docker"), else ib*,
// else what is neither docker*, lo* nor virbr*, else docker*, lo*, virbr*. Interfaces without an address count for
// nothing. Pure.
Choice nccl_choice(const std::vector<Interface>& interfaces, const Variables& variables);

Section describe(const std::vector<Interface>& interfaces, const Choice& gloo, const Choice& nccl);

}  // namespace ds::tool::report
